"""Installation of meml_jax; settings of tools are in pyproject.toml."""

import pathlib

from setuptools import find_packages, setup

setup(
    name="meml_jax",
    version="0.1.0",
    description="Few-shot unsupervised continual learning through meta-examples, in JAX",
    long_description=pathlib.Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.11",
    packages=find_packages(include=["meml_jax", "meml_jax.*"]),
    install_requires=[
        "absl-py>=2.1",
        "chex>=0.1.90",
        "flax>=0.12",
        "jax>=0.10",
        "matplotlib>=3.8",
        "ml-collections>=1.1",
        "numpy>=1.26",
        "optax>=0.2.5",
        "orbax-checkpoint>=0.11.20",
        "pillow>=10.3",
        "scikit-learn>=1.4",
        "scipy>=1.11",
        "tensorboardX>=2.6.2",
        "threadpoolctl>=3.5",
        "tqdm>=4.66",
    ],
    extras_require={
        "cuda": ["jax[cuda13]>=0.10"],
        "tfds": ["tensorflow-datasets>=4.9.8", "importlib_resources>=6.1"],
        "test": [
            "hypothesis>=6.100",
            "mypy>=1.10",
            "ott-jax>=0.5",
            "pytest>=8.0",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.5",
            "ruff>=0.5",
        ],
    },
    classifiers=[
        "License :: OSI Approved :: MIT License",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
