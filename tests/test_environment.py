"""What results say they were made on."""

from meml_jax import environment


def test_the_cores_are_those_that_may_be_used(monkeypatch):
    monkeypatch.setattr(environment.os, "sched_getaffinity", lambda pid: {3}, raising=False)
    assert environment.device_name().endswith(", 1 core")
    monkeypatch.delattr(environment.os, "sched_getaffinity")
    monkeypatch.setattr(environment.os, "cpu_count", lambda: 7)
    assert environment.device_name().endswith(", 7 cores")
