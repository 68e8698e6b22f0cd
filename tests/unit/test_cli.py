"""The command line: `list` and `show`, wrong usage, dumps that cannot be used."""

import dataclasses
import json
import shlex
from pathlib import Path

import pytest

from ddp_nanguard.cli import completion
from ddp_nanguard.cli import main as cli
from ddp_nanguard.cli.help_text import GROUPS
from ddp_nanguard.dump import listing, write_dump
from ddp_nanguard.dump.records import SCHEMA_VERSION
from tests.dump_requests import report, request
from tests.replaying import under_torchrun


def run_cli(capsys, *arguments):
    try:
        code = cli.main([str(argument) for argument in arguments])
    except SystemExit as error:
        code = error.code
    out, err = capsys.readouterr()
    return code, out, err


def test_cli_list(tmp_path, path, capsys):
    write_dump(request(tmp_path, step=123456789, options={"dump_keep": 0}))
    (tmp_path / "step-00000008.partial" / "rank-00003").mkdir(parents=True)
    code, out, err = run_cli(capsys, "list", tmp_path)
    assert (code, err) == (0, "")
    table, again = out.split("\n\n")
    assert again == "forward · layers.2.act · output: NaN\n  seen 2 times, steps 7, 123456789\n"
    header, first, second, third = table.splitlines()
    assert header.split() == ["STEP", "WHEN", "DUMP", "RANKS", "SIZE", "STATUS", "ORIGIN"]
    assert first.split()[0] == "7" and "step-00000007  " in first and "1/1" in first and "whole" in first
    assert "rank 0 · micro-batch 1 · forward · layers.2.act (call 1): finite in, NaN out" in first
    assert second.split()[0] == "8" and "1/?" in second and "partial" in second
    assert third.split()[0] == "123456789"
    columns = {
        line.rindex(text) for line, text in zip((first, second, third), ("whole", "partial", "whole"), strict=True)
    }
    assert columns == {header.index("STATUS")}


def test_cli_list_looks_below_the_directory_and_follows_no_circle(tmp_path, capsys):
    first = write_dump(request(tmp_path / "a" / "run" / "nan_dumps", step=3)).path
    second = write_dump(request(tmp_path / "b", step=4)).path
    (tmp_path / "b" / "circle").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "a" / "again").symlink_to(tmp_path / "b", target_is_directory=True)
    code, out, err = run_cli(capsys, "list", tmp_path, "--json")
    assert (code, err) == (0, "")
    assert [(dump["step"], Path(dump["path"]).resolve()) for dump in json.loads(out)["dumps"]] == [
        (3, Path(first)),
        (4, Path(second)),
    ]
    _, out, _ = run_cli(capsys, "list", tmp_path / "a" / "run")
    assert f"  {first}  " in out, "it says where it lies"
    assert run_cli(capsys, "list", __file__)[::2] == (
        2,
        f"ddp-nanguard: {__file__} is no directory; give the dump_dir of a run, or a directory above it\n",
    )


def test_latest_leads_to_the_dump_that_was_finished_last(tmp_path, capsys):
    for step in (9, 2):
        write_dump(request(tmp_path, step=step))
    assert (tmp_path / "latest").readlink() == Path("step-00000002")
    code, out, _ = run_cli(capsys, "show", tmp_path / "latest")
    assert code == 0 and out.splitlines()[-1].endswith(f"ddp-nanguard replay {tmp_path}/step-00000002 --trace")
    assert run_cli(capsys, "list", tmp_path / "latest")[1].splitlines()[1].split()[0] == "2"
    assert len(run_cli(capsys, "list", tmp_path)[1].split("\n\n")[0].splitlines()) == 3, "it is no dump of its own"


def test_a_dump_is_written_where_latest_is_taken(tmp_path):
    (tmp_path / "latest").mkdir()
    result = write_dump(request(tmp_path))
    assert result.problems == [] and (tmp_path / "latest").is_dir() and not (tmp_path / "latest").is_symlink()


def test_cli_list_of_nothing(tmp_path, capsys):
    assert run_cli(capsys, "list", tmp_path) == (0, "no dumps\n", "")
    line = f"ddp-nanguard: {tmp_path}/x does not exist: nothing went bad there yet, or the run had another dump_dir\n"
    assert run_cli(capsys, "list", tmp_path / "x") == (2, "", line)


def test_cli_show(path, capsys):
    code, out, err = run_cli(capsys, "show", path)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[:2] == ["rank 0, step 7, micro-batch 1, forward", "  layers.2.act (call 1): finite in, NaN out"]
    assert lines[-1] == f"  next      ddp-nanguard replay {path} --trace"
    assert "\x1b" not in out and max(len(line) for line in lines if str(path) not in line) <= 110
    code, out, _ = run_cli(capsys, "show", path, "--json")
    assert code == 0 and json.loads(out) == {
        "schema_version": SCHEMA_VERSION,
        **dataclasses.replace(report(), dump_path=str(path)).to_dict(),
    }


@pytest.mark.parametrize("arguments", [[], ["show"], ["list"], ["nothing"], ["show", "--frames", "x"]])
def test_cli_wrong_usage(arguments, capsys):
    code, out, err = run_cli(capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("ddp-nanguard: ")
    command = f"{arguments[0]} " if arguments in (["show"], ["list"]) else ""
    assert err.endswith(f"; see what is valid: ddp-nanguard {command}--help\n")


def test_cli_unusable_dump(path, capsys):
    (path / "manifest.json").write_text("{")
    code, out, err = run_cli(capsys, "show", path)
    assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith(
        f"ddp-nanguard: {path}/manifest.json is no valid"
    )


@pytest.mark.parametrize("option", ["--json", "--rank=0", "--rank=1", "--repeat=3", "--dtype=float64", "--minimize"])
def test_what_one_rank_alone_can_do_is_refused_on_all_ranks(path, capsys, monkeypatch, option):
    under_torchrun(monkeypatch)
    code, out, err = run_cli(capsys, "replay", path, option)
    name = option.partition("=")[0]
    expected = f"option {name} is for the replay of one rank: leave it out, or run without torchrun"
    assert (code, out, err) == (2, "", f"ddp-nanguard: {expected}\n")


def test_the_variables_of_a_container_are_no_launcher(path, capsys, monkeypatch):
    for name, value in (("RANK", "x"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "job-0"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, value)
    code, _, err = run_cli(capsys, "replay", path)
    assert code == 2 and "'train'" in err, "it got as far as the recipe, which is not there"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["show", "x" * 5000], "is no directory: File name too long; give the path of a dump"),
        (["demo", "--nproc", "0"], "argument --nproc: '0' is no number from 1 on"),
        (["demo", "--out", __file__], f"option --out={__file__}: File exists; give a directory that can be made"),
        (["drill", "--step", "-1", "--", "true"], "argument --step: '-1' is no number from 0 on"),
        (["drill", "--rank", "-1", "--", "true"], "argument --rank: '-1' is no number from 0 on"),
        (["drill", "--timeout", "nan", "--", "true"], "argument --timeout: 'nan' is no number of seconds above 0"),
        (["drill", "--out", f"{__file__}/x", "--", "true"], "Not a directory; give a directory that can be made"),
        (["drill", "--", "no-such-command"], "no command 'no-such-command'; give what starts the job"),
    ],
)
def test_cli_values_that_do_not_fit(arguments, said, capsys):
    code, out, err = run_cli(capsys, *arguments)
    assert (code, out) == (2, "") and said in err.splitlines()[-1]


def test_help_tells_what_to_do_first_and_an_example_of_every_command(capsys):
    code, out, _ = run_cli(capsys, "--help")
    assert code == 0
    for group, commands in GROUPS.items():
        assert f"\n{group}:\n" in out
        for name, told in commands.items():
            assert f"\n  {name:<12}{told.summary}\n" in out and f"$ ddp-nanguard {told.examples[0][0]}\n" in out
    assert "A job has just stopped?" in out and "  ddp-nanguard show nan_dumps/latest\n" in out


ALL_HELP = {name: told for commands in GROUPS.values() for name, told in commands.items()}


@pytest.mark.parametrize("name", ALL_HELP)
def test_help_of_a_command_has_examples_that_the_command_takes(name, capsys):
    code, out, _ = run_cli(capsys, name, "--help")
    assert code == 0 and out.startswith("usage: ddp-nanguard")
    for line, purpose in ALL_HELP[name].examples:
        assert f"{line}\n      {purpose}\n" in out
        words = shlex.split(line.partition(" > ")[0])
        arguments, _ = cli.replay.without_job(words[words.index(name) :])
        assert cli._parser().parse_args(arguments).command is not None


def test_every_command_is_in_the_overview():
    (commands,) = (action.choices for action in cli._parser()._actions if isinstance(action.choices, dict))
    assert set(commands) == set(ALL_HELP)


def test_completion_without_shtab_names_the_extra(capsys, monkeypatch):
    monkeypatch.setattr(completion.importlib.util, "find_spec", lambda name: None)
    expected = "ddp-nanguard: completion needs shtab; pip install 'ddp-nanguard[completion]'\n"
    assert run_cli(capsys, "completion", "bash") == (2, "", expected)


def test_completion_knows_commands_and_options(capsys):
    pytest.importorskip("shtab")
    code, out, err = run_cli(capsys, "completion", "bash")
    assert (code, err) == (0, "")
    assert "--no-replay" in out and "doctor" in out


def test_cli_list_of_very_many_directories_says_where_it_ended(tmp_path, capsys, monkeypatch, caplog):
    monkeypatch.setattr(listing, "MAX_DIRECTORIES", 3)
    for name in ("a", "b", "c"):
        write_dump(request(tmp_path / name))
    code, out, _ = run_cli(capsys, "list", tmp_path, "--json")
    assert code == 0 and [Path(dump["path"]).parent.name for dump in json.loads(out)["dumps"]] == ["a", "b"]
    assert f"{tmp_path}: only 3 directories below it were looked at; give one further down" in caplog.messages


def test_cli_list_goes_a_few_levels_down(tmp_path, capsys):
    deep = tmp_path.joinpath(*"abcdef", "nan_dumps")
    write_dump(request(deep))
    assert run_cli(capsys, "list", tmp_path)[1] == "no dumps\n"
    assert f"{deep}/step-00000007" in run_cli(capsys, "list", tmp_path / "a")[1]
