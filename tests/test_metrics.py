import io
import json

import pytest

from meml_jax import figures, metrics
from meml_jax.types import UserError


class Terminal(io.StringIO):
    def isatty(self):
        return True


def steps(path):
    return [record["step"] for record in metrics.read(path / "metrics.jsonl")]


def test_records_are_lines_that_are_there_at_once(tmp_path):
    with metrics.MetricWriter(tmp_path, 100, tensorboard=False, stream=io.StringIO()) as writer:
        writer.write(10, {"train/loss": 0.1 + 0.2})
        writer.write(20, {"train/loss": float("nan"), "validation/accuracy": 0.5})
        first, second = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert first["step"] == 10 and first["train/loss"] == 0.1 + 0.2 and first["time"] > 1e9
    assert second["train/loss"] is None and second["validation/accuracy"] == 0.5
    assert metrics.read(tmp_path / "metrics.jsonl") == [first, second]


def test_resume_cuts_later_records_and_a_half_line(tmp_path):
    with metrics.MetricWriter(tmp_path, 100, tensorboard=False, stream=io.StringIO()) as writer:
        for step in (10, 20, 30, 40):
            writer.write(step, {"train/loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 50, "ti')
    assert steps(tmp_path) == [10, 20, 30, 40]
    with metrics.MetricWriter(
        tmp_path, 100, start_step=20, tensorboard=False, stream=io.StringIO()
    ) as writer:
        assert steps(tmp_path) == [10, 20]
        writer.write(30, {"train/loss": 2.0})
    assert steps(tmp_path) == [10, 20, 30]
    with metrics.MetricWriter(tmp_path, 100, tensorboard=False, stream=io.StringIO()):
        assert steps(tmp_path) == []  # from step 0 everything comes again


def test_a_bad_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert metrics.read(path) == []
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(UserError, match="line 2: got b'nonsense'"):
        metrics.read(path)


@pytest.mark.parametrize(
    "line",
    ["[" * 100_000, '{"step": 1e999}', '{"step": "2"}', '{"step": 2, "train/loss": "abc"}',
     '{"step": 2, "train/loss": [1]}', '{"step": 1' + "0" * 400 + "}", "[1]", "{}"],
    ids=["nested", "infinite", "word", "value", "list", "huge", "no record", "no step"],
)  # fmt: skip
def test_a_damaged_line_is_named_and_left_out_where_it_is_the_last(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}')
    assert metrics.read(path) == [{"step": 1}]
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(UserError, match="metrics.jsonl line 2: got .*; delete this line$"):
        metrics.read(path)


def test_a_folder_in_the_place_of_the_records(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match="metrics.jsonl: Is a directory; move"):
        metrics.read(tmp_path / "metrics.jsonl")
    for start_step in (0, 20):
        with pytest.raises(UserError, match="metrics.jsonl.*Is a directory"):
            metrics.MetricWriter(tmp_path, 100, start_step=start_step, tensorboard=False)


def test_values_that_are_no_numbers_are_not_drawn(tmp_path):
    values = (0.5, "abc", [1.0], None, float("inf"), float("nan"), 0.25)
    records = [{"step": i, "train/loss": value} for i, value in enumerate(values)]
    drawn = [r for r in records if r["train/loss"] in (0.5, 0.25)]
    for name, given in (("all", records), ("some", drawn)):
        figures.training_curves(given, tmp_path / f"{name}.png", validation_classes=2)
    assert (tmp_path / "all.png").read_bytes() == (tmp_path / "some.png").read_bytes()


def test_tensorboard_events_and_purge(tmp_path):
    from tensorboardX.proto import event_pb2

    def events():  # TFRecord form: length, its checksum, data, its checksum
        found = []
        for path in sorted((tmp_path / "tensorboard").iterdir(), key=lambda p: p.stat().st_mtime):
            data = path.read_bytes()
            while data:
                size = int.from_bytes(data[:8], "little")
                found.append(event_pb2.Event.FromString(data[12 : 12 + size]))
                data = data[16 + size :]
        return found

    with metrics.MetricWriter(tmp_path, 100, stream=io.StringIO()) as writer:
        writer.write(50, {"train/loss": 3.0})
    assert [(e.step, e.summary.value[0].simple_value) for e in events() if e.summary.value] == [
        (50, 3.0)
    ]
    with metrics.MetricWriter(tmp_path, 100, start_step=20, stream=io.StringIO()) as writer:
        writer.write(30, {"train/loss": 2.0})
    assert [e.step for e in events() if e.HasField("session_log")] == [0, 21]


def test_a_second_line_of_a_step_has_no_speed(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: clock[0])
    stream = io.StringIO()
    report = metrics.Progress(100, "drawing", unit="classes", stream=stream)
    for text in ("loss 1", "validation 2"):
        clock[0] += 25
        report(50, 100, text=text)
    assert stream.getvalue().splitlines() == [
        "drawing: 50/100, 2 classes/s, ETA 00:25, loss 1",
        "drawing: 50/100, validation 2",
    ]


def test_a_high_speed_has_no_exponent(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: clock[0])
    stream = io.StringIO()
    report = metrics.Progress(None, "images", unit="images", stream=stream)
    for done, seconds in ((15_345, 10), (24_995, 20), (25_001, 31)):
        clock[0] = seconds
        report(done, 50_000)
    assert [line.split(", ")[1] for line in stream.getvalue().splitlines()] == [
        "1530 images/s", "965 images/s", "0.545 images/s",
    ]  # fmt: skip


def test_log_lines_are_sparse_and_the_last_one_comes(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: clock[0])
    stream = io.StringIO()
    report = metrics.Progress(100, "drawing", unit="classes", stream=stream)
    for done in range(1, 101):
        clock[0] += 0.5
        report(done, 100, text=f"loss {done}")
    report(100, 100)
    report.close()
    assert stream.getvalue().splitlines() == [
        "drawing: 20/100, 2 classes/s, ETA 00:40, loss 20",
        "drawing: 40/100, 2 classes/s, ETA 00:30, loss 40",
        "drawing: 60/100, 2 classes/s, ETA 00:20, loss 60",
        "drawing: 80/100, 2 classes/s, ETA 00:10, loss 80",
        "drawing: 100/100, 2 classes/s, took 00:50, loss 100",
    ]


def test_resumed_steps_do_not_count_in_the_speed(monkeypatch, tmp_path):
    clock = [0.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: clock[0])
    stream = io.StringIO()
    with metrics.MetricWriter(
        tmp_path, 1000, start_step=500, tensorboard=False, stream=stream
    ) as writer:
        writer.write(520, {"validation/accuracy": 0.25})
        clock[0] = 20.0
        writer.write(600, {"train/loss": 1.23456})
    assert stream.getvalue() == (
        "meta-train: 600/1000, 5 steps/s, ETA 01:20, validation/accuracy 0.25, train/loss 1.235\n"
    )


def test_a_terminal_gets_a_bar():
    terminal = Terminal()
    report = metrics.Progress(None, "reading", stream=terminal)
    for done in (1, 2, 3):
        report(done, 3)
    report.close()
    assert "reading" in terminal.getvalue() and "3/3" in terminal.getvalue()
