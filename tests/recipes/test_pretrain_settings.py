"""Settings: the command line over the TOML file over the defaults, and an error for everything else."""

from pathlib import Path

import pytest
from f8sub_pretrain.settings import Settings, SettingsError, parse

ROOT = Path(__file__).parents[2]


def toml(folder: Path, text: str) -> str:
    path = folder / "job.toml"
    path.write_text(text)
    return str(path)


def test_command_line_overrides_the_file_and_the_file_the_defaults(tmp_path):
    path = toml(tmp_path, "[training]\nsteps = 7\nseq_len = 64\n[optimizer]\nlr = 1\n")
    options = ["--training.steps", "9", "--float8.recipe", "rowwise", "--float8.all_gather", "false"]
    settings = parse([*options, "--job.config_file", path])
    assert (settings.float8_recipe, settings.float8.all_gather) == ("rowwise", False)
    assert (settings.training.steps, settings.training.seq_len) == (9, 64)
    assert settings.optimizer.lr == 1.0
    assert isinstance(settings.optimizer.lr, float)
    assert settings.training.local_batch_size == Settings().training.local_batch_size


@pytest.mark.parametrize("spelling", ["--job.config_file={}", "--job.config-file={}"])
def test_the_file_is_found_however_it_is_spelled(tmp_path, spelling):
    path = toml(tmp_path, "[training]\nsteps = 7\n")
    assert parse([spelling.format(path)]).training.steps == 7


@pytest.mark.parametrize("option", ["--float8.enabled false", "--float8.enabled=False", "--float8.recipe="])
def test_without_float8(option):
    assert parse(option.split()).float8_recipe == ""


def test_recipes_of_some_layers_are_a_table(tmp_path):
    assert Settings().float8.layer_recipes == {}
    path = toml(tmp_path, "[float8.layer_recipes]\n'layers.*.mlp' = 'rowwise'\n'layers.0' = 'blockwise'\n")
    words = ["--float8.layer_recipes", "layers.*.mlp", "rowwise", "layers.0", "blockwise"]
    for given in (["--job.config_file", path], words):
        found = list(parse(given).float8.layer_recipes.items())
        assert found == [("layers.*.mlp", "rowwise"), ("layers.0", "blockwise")]


def test_the_shipped_file_parses():
    parse(["--job.config_file", str(ROOT / "recipes" / "pretrain.toml")])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[float8]\nrecpie = 'rowwise'", r"\[float8\]: unknown key 'recpie'. Did you mean 'recipe'"),
        ("[flaot8]\nrecipe = 'rowwise'", "unknown key 'flaot8'. Did you mean 'float8'"),
        ("zebra = 1", "unknown key 'zebra'. It knows job, model"),
        ("float8 = true", r"float8 is a section \(\[float8\]\), but the file gives it True"),
        ("[training]\nsteps = '10'", "steps = '10': expected int, got str"),
        ("[training]\nsteps = true", "steps = True: expected int, got bool"),
        ("[float8]\nall_gather = 1", "all_gather = 1: expected bool, got int"),
        ("[float8]\nlayer_recipes = 'rowwise'", "layer_recipes = 'rowwise': expected a table of strings"),
        ("[float8.layer_recipes]\nmlp = 1", "expected a table of strings"),
        ("[float8]\nskip = 'lm_head'", "skip = 'lm_head': expected a list of strings"),
        ("[training]\ndtype = 'bf16'", "dtype = 'bf16': expected one of 'bfloat16', 'float16', 'float32'"),
        ("compare = 'fp16'", "compare = 'fp16': expected one of '', 'bf16', 'gradients'"),
        ("[training]\nreduce_dtype = 'bf16'", "expected one of 'float32', 'bfloat16'"),
        ("[training", "is not TOML"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, text, message):
    path = toml(tmp_path, text)
    with pytest.raises(SettingsError, match=message):
        parse(["--job.config_file", path])


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(SettingsError, match=r"nowhere\.toml: cannot be read \(No such file"):
        parse(["--job.config_file", str(tmp_path / "nowhere.toml")])


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("--float8.recpie rowwise", "--float8.recpie"),
        ("--training.steps many", "--training.steps"),
        ("--float8.all_gather maybe", "expected true or false"),
    ],
)
def test_a_wrong_option_is_refused_by_name(capsys, option, named):
    with pytest.raises(SystemExit) as stopped:
        parse(option.split())
    assert stopped.value.code == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--training.steps 0", "training.steps = 0: must be at least 1"),
        ("--training.local_batch_size 0", "training.local_batch_size = 0: must be at least 1"),
        ("--data.eval_every_nth 1", "data.eval_every_nth = 1: must be at least 2"),
        ("--optimizer.lr nan", "optimizer.lr = nan: must be at least 0"),
        ("--compare bf16 --float8.enabled false", "but float8 is off"),
        ("--compare bf16 --training.dtype float16", "would not be bf16"),
        ("--compare bf16 --checkpoint.resume newest", "leave checkpoint.resume empty"),
        ("--compare gradients --checkpoint.resume newest", "leave checkpoint.resume empty"),
        ("--float8.gradients true --training.reduce_dtype bfloat16", "would round the sums"),
    ],
)
def test_values_out_of_range_are_refused(option, message):
    with pytest.raises(SettingsError, match=message):
        parse(option.split())
