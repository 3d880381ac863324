"""The benchmark: what is counted, how it is timed, what is printed and stored."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from meml_jax import flops
from meml_jax.config import NetworkConfig
from meml_jax.learners import LEARNERS
from meml_jax.networks import make_network
from meml_jax.types import UserError

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
sys.path.append(str(EXPERIMENTS))

import benchmark  # noqa: E402
import benchmark_cases  # noqa: E402
import benchmark_page  # noqa: E402
import benchmark_parts  # noqa: E402
import benchmark_timing  # noqa: E402


def run(*argv):
    """Call the program in this process: (exit code, standard output, standard error)."""
    out, err = io.StringIO(), io.StringIO()
    precision = jax.config.jax_default_matmul_precision
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = benchmark.main([str(arg) for arg in argv])
    finally:
        jax.config.update("jax_default_matmul_precision", precision)
    return code, out.getvalue(), err.getvalue()


@pytest.mark.parametrize(
    "image, maps, gflop",
    [((28, 28, 1), (13, 11, 5, 3, 1), 0.185), ((84, 84, 3), (41, 39, 19, 17, 8), 2.67)],
)
def test_operations_of_the_network_by_hand(image, maps, gflop):
    channels = 256
    net = make_network(
        NetworkConfig(channels=channels), LEARNERS["meml"], image_shape=image, num_classes=5
    )
    params = jax.eval_shape(net.init, jax.random.key(0))
    x = jax.ShapeDtypeStruct((1, *image), jnp.float32)
    inputs = (image[2], *[channels] * 4)
    last = (3, 3) if image[0] == 84 else (1, 1)  # (positions, kernel) a side of the last one
    expected = (
        sum(2 * n**2 * 9 * c * channels for n, c in zip(maps, inputs, strict=True))
        + 2 * last[0] ** 2 * last[1] ** 2 * channels**2
    )
    assert flops.count(net.encode, params, x) == expected == pytest.approx(gflop * 1e9, rel=2e-3)
    # The compiler's count has the biases and the ReLUs besides.
    compiled = jax.jit(net.encode).lower(params, x).compile()
    assert expected < compiled.cost_analysis()["flops"] < 1.02 * expected


def test_operations_of_other_programs():
    a, b = jnp.ones((2, 3)), jnp.ones((3, 5))
    assert flops.count(jnp.matmul, a, b) == 2 * 2 * 3 * 5
    assert flops.count(lambda a: lax.scan(lambda c, _: (c, a @ b), 0.0, length=7), a) == 7 * 60
    assert flops.count(lambda a: lax.cond(a[0, 0] > 0, lambda: a @ b, lambda: a @ b + 1), a) == 60
    assert flops.count(jax.jit(lambda a: jnp.sin(a) @ b + 1), a) == 60
    x, kernel = jnp.ones((2, 7, 6, 3)), jnp.ones((3, 3, 3, 4))

    def native(x, kernel):
        layout = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, kernel, (2, 2), "VALID", dimension_numbers=layout)

    assert flops.count(native, x, kernel) == 2 * (2 * 3 * 2) * (3 * 3 * 3) * 4
    with pytest.raises(ValueError, match="while"):
        flops.count(lambda a: lax.while_loop(lambda c: c[0, 0] < 9, lambda c: c + 1, a), a)


def test_rounds_are_interleaved_and_counted():
    order = []
    found = benchmark_timing.interleave(
        {name: benchmark_timing.Case(lambda name=name: order.append(name), 2) for name in "ab"},
        benchmark_timing.Rounds(repeats=3),
    )
    assert order == ["a", "b"] * 4  # one round warms up
    assert all(t.ms >= 0 and t.cpu_ms >= 0 for t in found.values()) and set(found) == {"a", "b"}
    order.clear()
    benchmark_timing.interleave(
        {"a": benchmark_timing.Case(lambda: order.append(0))},
        benchmark_timing.Rounds(seconds=0, least=2),
    )
    assert len(order) == 3


def test_tables_are_aligned():
    rows = [{"name": "a", "ms": 1234.5, "peak_share": 0.256}, {"name": "long", "ms": None}]
    lines = benchmark_page.table(rows).splitlines()
    assert lines == [
        "| name |   ms | peak_share |",
        "|------|-----:|-----------:|",
        "| a    | 1234 |       26 % |",
        "| long |    - |          - |",
    ]


def stored(**parts):
    versions = {"jax": "1", "jaxlib": "2"}
    common = {"schema": 1, "device": "d", "versions": versions, "commit": "c", "seconds": 3.0}
    return common | {"parts": parts}


def test_ratios_to_an_earlier_run():
    old = stored(steps=[{"name": "a", "ms": 2.0, "GFLOP": 1.0}, {"name": "gone", "ms": 1.0}])
    new = stored(steps=[{"name": "a", "ms": 3.0, "GFLOP": 1.0}, {"name": "new", "ms": 1.0}])
    assert benchmark.compare(old, new) == [
        {"name": "steps: a", "figure": "ms", "old": 2.0, "new": 3.0, "new/old": 1.5}
    ]


def test_pages_are_filled(tmp_path):
    page, file = tmp_path / "page.md", tmp_path / "b.json"
    file.write_text(json.dumps(stored(peak=[{"name": "matmul", "ms": 2.0}])))
    page.write_text(
        "# T\n\n<!-- benchmark: machine -->\nold\n<!-- end -->\nkept\n"
        "<!-- benchmark: peak -->\n<!-- end -->\nend\n"
    )
    for _ in range(2):  # filling again changes nothing
        assert run(f"--json={file}", f"--write_docs={page}")[0] == 0
        lines = page.read_text().splitlines()
        assert "old" not in lines and lines[-1] == "end" and "kept" in lines
        assert lines[3].startswith("d; jax 1, jaxlib 2; commit c") and "| matmul |  2 |" in lines
    page.write_text("<!-- benchmark: stream -->\n<!-- end -->\n")
    code, _, err = run(f"--json={file}", f"--write_docs={page}")
    assert code == 2 and "'stream'" in err
    with pytest.raises(UserError, match="no <!-- benchmark"):
        benchmark_page.fill("nothing", stored())
    with pytest.raises(UserError, match="no <!-- end --> after <!-- benchmark: machine"):
        benchmark_page.fill("<!-- benchmark: machine -->\nkept", stored())


def test_the_page_of_the_repository_can_be_filled():
    page = (EXPERIMENTS.parent / "docs" / "performance.md").read_text()
    parts = {part: [{"name": "x", "ms": 1.0}] for part in benchmark.PARTS}
    filled = benchmark_page.fill(page, stored(**parts))
    assert benchmark_page.fill(filled, stored(**parts)) == filled
    assert filled.count("| x    |  1 |") == page.count("<!-- benchmark: ") - 1


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--only=stpes"], "--only has 'stpes'"),
        (["--repeats=0"], "--repeats=0"),
        (["--compare=nowhere.json"], "nowhere.json"),
        (["--write_docs=page.md"], "--json"),
        (["--only="], "--only is empty"),
    ],
)
def test_mistakes_end_in_one_line(argv, words):
    code, _, err = run(*argv)
    assert code == 2 and words in err and err.count("\n") == 1


def test_a_page_that_is_not_there_is_named(tmp_path):
    (tmp_path / "b.json").write_text(json.dumps(stored(peak=[])))
    page = tmp_path / "page.md"
    code, _, err = run(f"--json={tmp_path / 'b.json'}", f"--write_docs={page}")
    assert code == 2 and err == f"error: --write_docs={page}: No such file or directory\n"


def test_a_part_that_fails_is_named(monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    code, _, err = run("--small", "--repeats=1", "--only=compile")
    assert code == 2 and err.startswith("error: the process that the part compile measures ended")
    assert "with code 1" in err and err.count("\n") == 1


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_keeps_the_parts_that_are_measured(tmp_path, monkeypatch, signum):
    def stopped(sizes, rounds):
        os.kill(os.getpid(), signum)
        time.sleep(60)

    rows = [{"name": "matmul", "ms": 2.0}]
    monkeypatch.setitem(benchmark_parts.PARTS, "peak", lambda sizes, rounds: rows)
    monkeypatch.setitem(benchmark_parts.PARTS, "memory", stopped)
    file, flags = tmp_path / "b.json", ("--small", "--repeats=1")
    code, out, err = run(*flags, "--only=peak,memory", f"--json={file}")
    assert code == 128 + signum and not err
    assert out.endswith(f"stopped; {file} has peak, the same command measures anew\n")
    assert benchmark.read(file)["parts"] == {"peak": rows}
    code, out, _ = run(*flags, "--only=memory", f"--json={file}")
    assert code == 128 + signum and "stopped; nothing is stored" in out
    assert benchmark.read(file)["parts"] == {"peak": rows}


def test_a_device_that_is_not_there_is_refused():
    command = [sys.executable, str(EXPERIMENTS / "benchmark.py"), "--device=tpu"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "error: --device=tpu" in done.stderr.splitlines()[-1]


def check_rows(found, parts):
    assert sorted(found["parts"]) == sorted(parts) and found["schema"] == 1
    for part, rows in found["parts"].items():
        names = [row["name"] for row in rows]
        assert rows and len(set(names)) == len(names), part
        for row in rows:
            for figure, value in row.items():
                good = value is None or isinstance(value, str) or np.isfinite(value)
                assert good, (part, row["name"], figure)
                assert figure not in ("ms", "temp_mb", "gflops") or value > 0


def test_figures_of_a_step_by_hand():
    """25 images at 2 ms a GFLOP are half of a peak of 1 GFLOP/ms; FEN and CLN take 40 of 50 ms."""
    found = {"step": benchmark_timing.Time(50.0, 60.0), "floor": benchmark_timing.Time(40.0, 45.0)}
    facts = {"K/Q": "10/15", "GFLOP": 25.0, "floor": "floor", "yardstick_ms": 92.0}
    row = benchmark_parts.step_row("step", found, facts, 1000.0)
    assert row["peak_share"] == pytest.approx(0.5)
    assert row["outside_share"] == pytest.approx(0.2)
    assert row["outside_cpu_share"] == pytest.approx(0.25)
    assert row["ms_at_450"] == pytest.approx(50 * 1000 / 450)
    assert row["speedup"] == pytest.approx(92 / row["ms_at_450"])


def test_figures_and_a_trace_are_stored(tmp_path):
    file, trace = tmp_path / "b.json", tmp_path / "trace"
    flags = ("--small", "--repeats=1", "--only=peak", f"--json={file}", f"--profile={trace}")
    code, out, err = run(*flags)
    assert code == 0, err
    check_rows(json.loads(file.read_text()), ["peak"])
    assert "matmul 64" in out and any(trace.rglob("*.xplane.pb"))
    assert run(*flags[:4], f"--compare={file}")[1].count("peak: matmul 64") == 2  # ms, gflops


@pytest.mark.slow
def test_tasks_have_the_sizes_of_the_yardstick():
    for size, sizes in {10: (4, 13), 20: (10, 15), 30: (14, 18)}.items():
        config = NetworkConfig(channels=4, hidden=4)
        problem = benchmark_cases.make_problem("meml", np.full(5, size), network=config)
        shapes = benchmark_cases.task_shapes(problem)
        assert tuple(rows.mask.shape[1] for rows in shapes) == sizes


@pytest.mark.slow
def test_every_part_is_measured_at_tiny_size(tmp_path):
    file = tmp_path / "b.json"
    command = [sys.executable, str(EXPERIMENTS / "benchmark.py"), "--small", "--repeats=1"]
    subprocess.run([*command, f"--json={file}"], check=True, stdout=subprocess.DEVNULL)
    found = json.loads(file.read_text())
    check_rows(found, list(benchmark.PARTS))
    assert found["parts"]["steps"][0]["name"] == "omniglot meml 10"
    memory = {row["name"] for row in found["parts"]["memory"]}
    assert {"meml", "oml, plain loop, encoded in it", "meml, native convolution"} <= memory
    assert all(part in benchmark_parts.PARTS for part in found["parts"] if part != "compile")
