"""Few-shot unsupervised continual learning through meta-examples (FUSION / MEML), in JAX."""
