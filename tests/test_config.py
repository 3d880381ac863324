"""Settings: one schema, checked wherever they come from."""

import dataclasses
import importlib.util
import json
import typing

import programs
import pytest

from meml_jax import checks, presets, settings
from meml_jax.config import Config
from meml_jax.settings import config_dict, flatten, from_dict, override
from meml_jax.types import UserError

FILES = sorted((programs.ROOT / "configs").glob("*.py"))  # tables: test_tables.py


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def set_field(locked, path, value):
    """Override a field as `--config.path=value` does."""
    *groups, name = path.split(".")
    for group in groups:
        locked = locked[group]
    locked[name] = value


# Names.


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("train.stesp", "train.steps"),
        ("trian.steps", "train.steps"),
        ("num_clusters", "clustering.num_clusters"),
        ("inner.learning_rates", "test.learning_rates"),
        ("sed", "seed"),
    ],
)
def test_an_unknown_field_gets_the_nearest_name(path, nearest):
    message = f"unknown config field '{path}'; did you mean '{nearest}'"
    with pytest.raises(UserError, match=message):
        override(Config(), {path: 1})
    with pytest.raises(UserError, match=message):
        settings.check_field(path)
    tree = dataclasses.asdict(Config())
    *groups, name = path.split(".")
    if groups and groups[0] in tree:
        tree[groups[0]][name] = 1
        with pytest.raises(UserError, match=message):
            from_dict(tree)


def test_a_field_like_none_gets_the_list():
    with pytest.raises(UserError, match=r"'qqq'; fields are preset, seed, .*test\.checkpoint"):
        override(Config(), {"qqq": 1})


def test_a_group_is_not_a_field():
    with pytest.raises(UserError, match="unknown config field 'train'"):
        override(Config(), {"train": 3})
    with pytest.raises(UserError, match="config.train is 3, expected a group of fields"):
        from_dict(dataclasses.asdict(Config()) | {"train": 3})


def test_the_config_file_is_locked():
    locked = config_dict(Config())
    with pytest.raises(AttributeError, match="stesp"):
        locked.train.stesp = 3
    with pytest.raises(AttributeError, match="did you mean|Did you mean"):
        print(locked.trian)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tasks.coreset_batch", 9, "no effect with tasks.query_from='other', expected.*'coreset'"),
        ("tasks.balance_size", 9, "no effect with tasks.balance='none', expected.*'truncate' or"),
        ("test.inner_steps", 3, "but episodes.ways=0 trains on one cluster a task"),
        ("episodes.shots", 3, "but episodes.ways=0 trains on one cluster a task"),
        ("episodes.ways", -1, "episodes.ways=-1, expected at least 0"),
        ("tasks.coreset_size", 10**13, "tasks.coreset_size=10000000000000, expected at most"),
        ("test.heads", ("sgd", "knn"), "test.heads=.'sgd', 'knn'., expected one or more of"),
        ("test.runs", 1, "test.runs=1, expected at least 2"),
        ("precision", "lowest", "precision='lowest', expected one of"),
        ("test.reservoir_size", 10**13, "test.reservoir_size=10000000000000, expected at most"),
    ],
)
def test_what_would_do_nothing_or_never_end_is_refused(field, value, message):
    with pytest.raises(UserError, match=message):
        checks.before_loading(override(Config(), {field: value}))


@pytest.mark.parametrize(
    "field, value", [("max_size", 15), ("usable_fraction", 0.75), ("num_random_query", 3)]
)
def test_what_episodes_do_not_use_is_refused(field, value):
    episodes = override(Config(), {"episodes.ways": 5})
    checks.before_loading(episodes)
    with pytest.raises(UserError, match=f"tasks.{field}={value} has no effect with episodes.ways"):
        checks.before_loading(override(episodes, {f"tasks.{field}": value}))


# Types.


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("train.steps", 1.5, "int"),
        ("train.steps", "10", "int"),
        ("train.steps", True, "int"),
        ("train.steps", None, "int"),
        ("outer.lr", "fast", "float"),
        ("outer.lr", True, "float"),
        ("data.skip_bad", 1, "bool"),
        ("data.skip_bad", "False", "bool"),
        ("learner", 3, "str"),
        ("data.dir", 3, "str"),
        ("tasks.max_size", 2.0, "int"),
        ("test.num_classes", 5, "tuple"),
        ("test.num_classes", (5, "x"), "int"),
        ("test.heads", ("sgd", 1), "str"),
        ("test.learning_rates", ("a",), "float"),
    ],
)
def test_a_value_of_a_wrong_type_is_refused(path, value, expected):
    with pytest.raises(UserError, match=rf"field '{path}(\[\d\])?' is .*, expected {expected}"):
        override(Config(), {path: value})


def test_whole_numbers_are_floats_and_lists_are_tuples():
    changed = override(Config(), {"outer.lr": 1, "test.learning_rates": [1, 0.1]})
    assert changed.outer.lr == 1.0 and type(changed.outer.lr) is float
    assert changed.test.learning_rates == (1.0, 0.1)
    assert Config().outer.lr == 1e-4  # the original stays


def optional_fields():
    for path, value in flatten(Config()).items():
        group = Config()
        *groups, name = path.split(".")
        for part in groups:
            group = getattr(group, part)
        kinds = typing.get_args(typing.get_type_hints(type(group))[name])
        if type(None) in kinds:
            yield path, next(k for k in kinds if k is not type(None)), value


SAMPLES = {int: (3, "x"), str: ("text", 3), float: (0.5, "x")}


@pytest.mark.parametrize(("path", "kind", "value"), list(optional_fields()))
def test_none_is_replaced_by_the_right_type_only(path, kind, value):
    right, wrong = SAMPLES[kind]
    locked = config_dict(Config())
    assert flatten(from_dict(locked.to_dict()))[path] is value is None
    with pytest.raises(TypeError):
        set_field(locked, path, wrong)
    set_field(locked, path, right)
    assert flatten(from_dict(locked.to_dict()))[path] == right
    with pytest.raises(UserError, match=path):
        override(Config(), {path: wrong})


# Presets and files.


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_config_file_builds_with_each_of_its_presets(path):
    module = load(path)
    with pytest.raises(UserError, match="unknown preset 'nonsense'") as error:
        module.get_config("nonsense")
    known = json.loads(str(error.value).partition("one or more of ")[2].replace("'", '"'))
    assert {"paper", "released", "smoke"} <= set(known)
    from_dict(module.get_config().to_dict())
    for name in known:
        built = from_dict(module.get_config(name).to_dict())
        assert (built.preset == "released") == (name == "released")
        if name != "smoke":
            small = from_dict(module.get_config(f"{name},smoke").to_dict())
            checks.before_loading(small)
            assert small.train.init == "random" and small.outer.fen_lr is None
    assert module.__doc__.count("--config=configs/") >= 1


@pytest.mark.parametrize(
    ("pair", "first"), [("mini_imagenet_cifar100", "mini_imagenet"), ("omniglot_cub", "omniglot")]
)
def test_out_of_distribution_runs_train_as_the_file_of_the_first_set(pair, first):
    def built(name, presets):
        return from_dict(load(programs.ROOT / f"configs/{name}.py").get_config(presets).to_dict())

    ood, own = built("ood", pair), built(first, "paper")
    for group in ("embedding", "clustering", "tasks", "network", "inner", "outer", "train"):
        assert getattr(ood, group) == getattr(own, group), group


def test_presets_are_separated_by_commas_and_later_ones_win():
    values = {"train.steps": 7, "outer.lr": 0.5}
    presets = {"one": {"train.steps": 1}, "two": {"train.steps": 2, "seed": 9}}

    def build(arg):
        return from_dict(settings.preset_config(arg, presets, values).to_dict())

    assert build("") == build("paper") == override(Config(), values)
    assert build("one").train.steps == 1 and build("one").outer.lr == 0.5
    assert build("one,two").train.steps == 2 and build("two,one").train.steps == 1
    released = build("released,two")
    assert released.preset == "released" and released.seed == 9
    assert released.tasks.min_size == 10 and not released.network.cln_relu
    said = r"preset 'tow', expected one or more of \['one', 'paper'.*; did you mean 'two'\?"
    with pytest.raises(UserError, match=said):
        build("one,tow")


def test_the_later_method_of_few_shot_wins_whole():
    get_config = load(programs.ROOT / "configs" / "few_shot_omniglot.py").get_config
    for method, steps in {"maml": 5, "fomaml": 5, "anil": 5, "meml": 1}.items():
        alone = from_dict(get_config(method).to_dict())
        assert alone.inner.steps == steps
        for other in ("maml", "meml"):
            assert from_dict(get_config(f"{other},{method}").to_dict()) == alone


@pytest.mark.parametrize("arg", ["released,paper", "paper,smoke,released", "mine,released"])
def test_one_run_is_named_after_one_method(arg):
    presets = {"mine": {"preset": "mine", "inner.lr": 0.1}, "smoke": {"train.steps": 3}}
    with pytest.raises(UserError, match=r"got \w+ and \w+, expected one of them"):
        settings.preset_config(arg, presets, {})
    built = from_dict(settings.preset_config(" released, smoke,", presets, {}).to_dict())
    assert built.preset == "released" and built.train.steps == 3


def test_departures_are_points_in_which_a_run_is_not_its_preset():
    released = override(Config(), settings.PRESETS["released"])
    assert settings.departures(Config()) == settings.departures(released) == {}
    changed = {"network.cln_relu": False, "learner": "oml", "inner.lr": 0.1}
    assert settings.departures(override(Config(), changed)) == {"network.cln_relu": False}
    changed = {"network.cln_relu": True, "test.protocol": "clean"}
    assert settings.departures(override(released, changed)) == changed
    assert settings.departures(override(released, {"preset": "mine"})) == {}


def test_the_released_preset_sets_fields_that_the_paper_leaves():
    paper, released = (override(Config(), settings.PRESETS[n]) for n in ("paper", "released"))
    assert paper == Config()
    changed = {k for k, v in flatten(released).items() if v != flatten(paper)[k]}
    assert changed == set(settings.PRESETS["released"])


# Storage.


def test_config_json_gives_the_same_settings_back():
    changed = override(
        Config(), {"tasks.max_size": 4, "test.num_classes": (3, 4), "outer.lr": 0.1 + 0.2}
    )
    text = json.dumps(dataclasses.asdict(changed))
    assert from_dict(json.loads(text)) == changed


def test_settings_of_an_earlier_version_lack_fields():
    tree = json.loads(json.dumps(dataclasses.asdict(override(Config(), {"seed": 4}))))
    del tree["inner"]["reset_bias"], tree["test_data"]
    assert from_dict(tree) == override(Config(), {"seed": 4})
    tree["inner"]["of_a_later_version"] = 1
    with pytest.raises(UserError, match="inner.of_a_later_version"):
        from_dict(tree)


# The command line: the effective settings are written before the data set turns out not to exist.


def effective(tmp_path, *flags, **fields):
    error = programs.refuse(tmp_path / "run", *flags, data__name="nothing", tiny=False, **fields)
    assert "data.name: got 'nothing'" in error
    return from_dict(json.loads((tmp_path / "run" / "config.json").read_text()))


@pytest.mark.parametrize(("text", "value"), [("True", True), ("False", False), ("0", False)])
def test_booleans_on_the_command_line(tmp_path, text, value):
    found = effective(tmp_path, data__skip_bad=text, network__cln_relu=text)
    assert found.data.skip_bad is value and found.network.cln_relu is value


@pytest.mark.parametrize(
    "text", ["sgd,prototype", "(sgd,prototype)", "('sgd','prototype')", "[sgd, 'prototype',]"]
)
def test_words_need_no_quotes_on_the_command_line(text):
    locked = config_dict(Config())
    # As ml_collections hands it over where it cannot read a tuple.
    words = ("sgd", "prototype") if text.startswith("('") else (text,)
    locked.test.heads = words
    assert from_dict(locked.to_dict()).test.heads == ("sgd", "prototype")


def test_tuples_none_fields_and_numbers_on_the_command_line(tmp_path):
    found = effective(
        tmp_path,
        "--config.tasks.max_size",  # the value may also stand apart
        "12",
        test__num_classes="(3,7)",
        test__learning_rates="0.1,0.01",
        test__heads="prototype,sgd",
        data__dir="5",
        outer__lr="1",
    )
    assert found.test.num_classes == (3, 7)
    assert found.test.learning_rates == (0.1, 0.01)
    assert found.test.heads == ("prototype", "sgd")
    assert found.data.dir == "5" and found.tasks.max_size == 12
    assert found.outer.lr == 1.0 and type(found.outer.lr) is float
    assert found.train.steps == 40 and found.preset == "paper"  # quickstart.py:smoke


def test_the_contrastive_preset_replaces_all_of_acais():
    assert presets.ACAI.keys() <= presets.CONTRASTIVE.keys()
