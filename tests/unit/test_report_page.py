"""What the report page and the index say, and what they do not: as HTML, without a browser."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from ddp_nanguard.capture.rng import capture
from ddp_nanguard.capture.window import MicroBatch
from ddp_nanguard.cli import report as report_command
from ddp_nanguard.dump import write_dump
from ddp_nanguard.dump.history import SERIES
from ddp_nanguard.page import magnitudes
from ddp_nanguard.page.batch import batch_table
from ddp_nanguard.page.magnitudes import INF, MISSING, NAN, ZERO, bin_of, grid, shortened
from ddp_nanguard.page.source import excerpt
from ddp_nanguard.page.timeline import timeline
from ddp_nanguard.report.slot_key import SlotKey
from ddp_nanguard.report.types import FirstOperator, Phase, SecondLook
from tests.dump_requests import DTYPES, history, report, request, site
from tests.golden import GOLDEN
from tests.page_dumps import edited, layer, unpacked, wide_dump
from tests.unit.test_cli import run_cli
from tests.unit.test_incidents import dumped

pytest.importorskip("jinja2", reason="the page needs the extra [report]")
pytest.importorskip("plotly", reason="the page needs the extra [report]")


def page_of(capsys, dump, *options):
    """The HTML of a dump, in which each run of white space is one space."""
    out = dump.parent / "page.html"
    code, _, err = run_cli(capsys, "report", dump, "-o", out, *options)
    assert (code, err) == (0, "")
    return " ".join(out.read_text().split())


def of_request(tmp_path, **changes):
    """A dump of one rank."""
    return Path(write_dump(request(tmp_path, **changes)).path)


# -- one dump ----------------------------------------------------------------------------------------------------------


def test_the_page_of_a_real_fault_has_what_a_person_needs(tmp_path, capsys):
    dump = shutil.copytree(GOLDEN, tmp_path / GOLDEN.name)
    page = page_of(capsys, dump)
    headline = '<span class="where">rank 1, step 2, micro-batch 0, forward:</span>'
    assert f'{headline} <span class="what">root (call 1): finite in, NaN out</span>' in page
    assert "<dd>edge of domain: sqrt of a negative number in `values.sqrt()` (recipe.py:19), at index 2</dd>" in page
    for command in ("replay {} --trace", "show {}", "explain {}"):
        assert f'data-copy="ddp-nanguard {command.format(dump)}"' in page
    assert "/job/tests/golden/recipe.py is not at hand here; the dump holds the statement alone" in page
    assert "Weights are not kept over time; the largest finite one in the dump is 8." in page
    assert '<tr class="marked"><th scope="row">2</th><td>NaN</td><td>NaN</td><td>NaN</td></tr>' in page
    assert "<code>batch[&#34;x&#34;]</code></th><td>float32</td><td>4</td><td>-16 … 25</td><td>–</td>" in page
    assert "same on all 2 ranks: deterministic" in page and "<dd>2.13.0+cpu</dd>" in page
    assert '<tr class="changed"><th scope="row"><code>layers</code></th><td>every</td></tr>' in page
    charts = json.loads(unpacked(page, "charts"))
    assert charts["timeline"]["steps"] == [0, 1, 2] and charts["timeline"]["limit"]["dtype"] == "float32"
    assert charts["maps"]["ranks"]["origin"] == [1, 1] and charts["maps"]["ranks"]["columns"] == [0, 1]


def test_names_of_layers_and_files_are_shown_and_do_nothing(tmp_path, capsys):
    page = page_of(capsys, wide_dump(tmp_path, world_size=3, bad_ranks=(1,)))
    assert "<script>alert" not in page and "<b>model</b>.py" not in page
    assert "&lt;script&gt;alert(&#39;layer&#39;)&lt;/script&gt;&amp;&lt;b&gt;bold&lt;/b&gt;" in page
    assert page.count("</script>") == 4, "two packed parts and the page's own two"


NOT_DONE = SecondLook("not_done", "not done: it has changed weights")
NO_STEPS = {"steps": np.array([], dtype=np.int64), **dict.fromkeys(SERIES, np.array([]))}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"history": NO_STEPS}, ["The history holds no clean step before the fault: no line to draw.", "chart-steps"]),
        ({"report": dataclasses.replace(report(), origin=None)}, ["The fault was attributed to no place", "step 7:"]),
        ({"report": dataclasses.replace(report(), single_rank_view=True)}, ["Peers did not answer: all of this is"]),
        ({"options": {"redact": True}}, ["No replay as it is; to replay, train with redact=False."]),
        ({"report": dataclasses.replace(report(), unchecked=("a scripted <i>",))}, ["<li>a scripted &lt;i&gt;</li>"]),
        ({"window": []}, ["The dump holds no batch of rank 0."]),
        (
            {},
            [
                "One rank trained, so there are no others to compare it with.",
                "there was no second look at the step.",
                "The place where it began is none of these rows.",
                "The report names nothing that was left unchecked.",
                "The step was not run a second time in place.",
            ],
        ),
        (
            {
                "report": dataclasses.replace(
                    report(), second_look=SecondLook("not_done", "not done: it has changed weights")
                )
            },
            ["the second look was not done.", '<b class="tag outcome">not done</b> it has changed weights'],
        ),
    ],
)
def test_what_a_dump_does_not_hold_is_said_in_a_sentence(tmp_path, capsys, changes, said):
    if "steps" in changes.get("history", {}):
        slots = {name: array for name, array in history().items() if name.startswith("fault.")}
        changes = {**changes, "history": {**changes["history"], **slots}}
    page = page_of(capsys, of_request(tmp_path, **changes))
    assert [text for text in said if text not in page] == []


def test_ranks_that_are_not_here_and_files_that_are_damaged_are_told(tmp_path, capsys):
    dump = wide_dump(tmp_path, world_size=4, bad_ranks=(1,))
    shutil.rmtree(dump / "rank-00003")
    (dump / "rank-00002" / "history.npz").write_bytes(b"no archive")
    (dump / "rank-00001" / "window.json").unlink()
    page = page_of(capsys, dump)
    assert "Nothing of these ranks is in the dump as it lies here: 3." in page
    assert "Without a readable history: ranks 2." in page
    assert "The batch of rank 1 cannot be read:" in page
    assert run_cli(capsys, "report", dump, "--rank", 3)[::2] == (
        2,
        f"ddp-nanguard: {dump} holds nothing of rank 3; of world_size=4 it has rank 0-2; "
        "give the directories of the other nodes too\n",
    )


def test_a_bad_update_is_no_clean_step_of_the_timeline(tmp_path, capsys):
    """The step that met it comes after it, or is the step itself where that was kept."""
    steps = history() | {"steps": np.array([6, 7])}
    steps |= {name.replace("6", "7").replace("5", "6"): array for name, array in steps.items() if name[:5] == "step."}
    met_later = page_of(capsys, of_request(tmp_path / "a", history=steps))
    assert json.loads(unpacked(met_later, "charts"))["maps"]["steps"]["columns"] == [6, 7, 8]
    assert "the last column is the step that met it" in met_later and "Layers by rank, step 8" in met_later
    assert "Step 8 met what the update of step 7 had left." in met_later
    kept = steps | {f"step.7.{part}": steps[f"fault.{part}"] for part in ("labels", "values")}
    itself = page_of(capsys, of_request(tmp_path / "b", history=kept))
    assert json.loads(unpacked(itself, "charts"))["maps"]["steps"]["columns"] == [6, 7]


# -- the parts ---------------------------------------------------------------------------------------------------------


def test_contents_of_the_batch_come_only_on_request():
    x = torch.tensor([[1.0, 2.0], [float("nan"), 4.0], [5.0, float("inf")]])
    batch = {"x": x, "y": np.array([1.0, np.nan, 3.0]), "text": "a secret", "flag": torch.tensor([True])}
    table = batch_table(MicroBatch(0, batch, capture()), contents=False)
    found = {leaf.name: leaf for leaf in table.leaves}
    assert (found['batch["x"]'].shape, found['batch["x"]'].range) == ("3 × 2", "1 … 5")
    assert found['batch["x"]'].bad == "1 NaN, 1 Inf, rows 1, 2" and found['batch["y"]'].bad == "1 NaN, 0 Inf, rows 1"
    assert (found['batch["y"]'].dtype, found['batch["text"]'].dtype) == ("float64", "str")
    assert "secret" not in str(table) and found['batch["flag"]'].range == ""
    shown = {leaf.name: leaf.content for leaf in batch_table(MicroBatch(0, batch, capture()), contents=True).leaves}
    assert shown['batch["text"]'] == "'a secret'" and "nan" in shown['batch["x"]']


def test_a_batch_of_tensors_of_every_kind_has_a_table():
    eye = torch.eye(2)
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    batch = [eye.to_sparse(), eye.to(torch.complex64).conj(), torch.empty(0, 3), eye.to("meta"), ragged]
    leaves = batch_table(MicroBatch(0, [*batch, np.zeros(2, ">i4")], capture()), contents=True).leaves
    assert leaves[-1].content == "array([0, 0], dtype='>i4')"
    assert {re.sub(r"j\d+", "j", leaf.shape) for leaf in leaves} == {
        "2",
        "2 × j, jagged: not looked at",
        "2 × 2, sparse_coo: not looked at",
        "2 × 2, strided: not looked at",
        "2 × 2",
        "0 × 3",
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_of_every_dtype_has_a_range_or_none(dtype):
    (leaf,) = batch_table(MicroBatch(0, torch.ones(2).to(dtype), capture()), contents=False).leaves
    has_no_order = dtype.is_complex or dtype is torch.bool
    assert (leaf.name, leaf.shape, leaf.bad) == ("batch", "2", "") and leaf.range == ("" if has_no_order else "1 … 1")


def test_source_lines_are_those_of_the_recorded_statement(tmp_path):
    file = tmp_path / "model.py"
    file.write_text("import a\n\n\ndef f(x):\n    return g(\n        x,\n        1,\n    )\n")
    operator = FirstOperator(0, "aten.div.Tensor", f"{file}:6 in f", "return g( x, 1, )")
    found = excerpt(operator, "/nowhere")
    assert found is not None and found.remark == "" and found.function == "f"
    assert [line.number for line in found.lines if line.marked] == [5, 6, 7, 8]
    relative = dataclasses.replace(operator, line="model.py:6 in f")
    assert excerpt(relative, str(tmp_path)).lines == found.lines
    file.write_text(file.read_text().replace("1,", "2,"))
    changed = excerpt(operator, "/nowhere")
    assert "has changed since" in changed.remark and [line.text for line in changed.lines] == [operator.code]


@pytest.mark.parametrize("code", ["", "root", "key = 1"])
def test_a_dump_cannot_make_the_page_show_another_file(tmp_path, code):
    for name in ("secret.txt", "secret.py"):
        (tmp_path / name).write_text("token = 'abc'\n")
        found = excerpt(FirstOperator(0, "aten.mm", f"{tmp_path / name}:1 in f", code), "/")
        assert "abc" not in str(found)
    assert excerpt(FirstOperator(0, "aten.mm", None, ""), "/") is None


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (-1.0, 1.0, 0),
        (-4.0, 1.0, 1),
        (0.0, 1000.0, 6),
        (0.0, 0.0, ZERO),
        (float("nan"), 1.0, NAN),
        (0.0, float("-inf"), INF),
        (0.0, 1e300, magnitudes.MAX_BIN),
        (0.0, 1e-320, -magnitudes.MAX_BIN),
    ],
)
def test_bins_are_half_decades(low, high, expected):
    assert bin_of(low, high) == expected


def test_a_large_heat_map_keeps_the_rows_that_went_bad_first(monkeypatch):
    monkeypatch.setattr(magnitudes, "MAX_CELLS", 40)
    labels = [SlotKey(Phase.FORWARD, 0, f"layers.{number}", 1, "output").to_label() for number in range(100)]
    clean = dict.fromkeys(labels, (0.0, 1.0))
    bad = clean | dict.fromkeys(labels[57:], (float("nan"), float("nan")))
    origin = dataclasses.replace(site(), layer="layers.57")
    found = grid({1: clean, 2: bad}, origin, 2)
    assert found.bins.shape == (20, 2) and found.remark.startswith("20 of 100 rows: those that went bad first")
    row, column = found.origin
    assert (found.rows[row].name, found.columns[column], found.bins[row].tolist()) == ("layers.57", 2, [0, NAN])
    assert grid({1: {}, 2: bad}, None, None).bins[0, 0] == MISSING


def test_a_negative_loss_is_drawn_by_its_size_and_told_with_its_sign():
    label = SlotKey(Phase.LOSS, 0, "loss", None, "").to_label()
    found = timeline({1: {label: (-2.5, -2.5)}}, {label: (float("nan"), float("nan"))}, 2, [float("nan")], "bfloat16")
    (series,) = found.series
    assert (series.legend, series.texts, found.limit) == (
        "loss, absolute",
        ("-2.5", "NaN"),
        ("bfloat16", 2.0**128 * (1 - 2.0**-8)),
    )


def test_short_names_keep_the_numbers_that_tell_layers_apart():
    assert shortened("blocks.1.norm2.weight", 16) == "b.1.norm2.weight"
    assert shortened(layer(20), 36) == "m.d.l.20.s.output_projection"
    assert shortened(layer(20), 16) == "m.d.l.20.s.outp…"
    assert shortened("x" * 40, 9) == "xxxx…xxxx" and shortened("head", 9) == "head"


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_index_tells_dumps_of_one_fault_together(tmp_path, capsys):
    for run in "ab":
        dumped(tmp_path / f"<b>{run}", 4812, run_id=run)
    write_dump(request(tmp_path, step=3, report=dataclasses.replace(report(3), origin=None)))
    (tmp_path / "step-00000009.partial").mkdir()
    out = tmp_path / "index.html"
    assert run_cli(capsys, "report", tmp_path, "-o", out)[0] == 0
    page = " ".join(out.read_text().split())
    assert "<h1>4 dumps, 1 fault that came again</h1>" in page and "<b>a" not in page
    assert "<h2>forward · layers.2.act · output: NaN</h2> <p>seen 2 times, steps 4812, 4812: deterministic</p>" in page
    assert page.index("Seen once") < page.index("partial") and out.stat().st_size < 20_000
    assert f"ddp-nanguard report &#39;{tmp_path}/&lt;b&gt;b/step-00004812&#39;" in page


def test_the_page_goes_where_it_is_asked_for(path, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_cli(capsys, "report", path) == (0, f"wrote {tmp_path}/report.html (2.0 MB)\n", "")
    code, told, _ = run_cli(capsys, "report", path.parent)
    assert (code, told.startswith(f"wrote {tmp_path}/index.html ("), told.endswith(" KB)\n")) == (0, True, True)
    (tmp_path / "empty").mkdir()
    assert run_cli(capsys, "report", "empty")[::2] == (
        2,
        "ddp-nanguard: empty: no dumps in or below it; give the dump_dir of a run\n",
    )
    assert run_cli(capsys, "report", path, "-o", "a/b.html")[::2] == (
        2,
        "ddp-nanguard: option --out=a/b.html: No such file or directory; give a file that can be written\n",
    )
    assert run_cli(capsys, "report", path.parent, "--png", "x.png")[::2] == (
        2,
        f"ddp-nanguard: option --png is for one dump; {path.parent} is none, see: ddp-nanguard list\n",
    )


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ([], "ddp-nanguard report needs jinja2 and plotly: pip install 'ddp-nanguard[report]'\n"),
        (["--png", "x.png"], "ddp-nanguard report --png needs matplotlib: pip install 'ddp-nanguard[report]'\n"),
    ],
)
def test_without_the_packages_one_line_names_the_extra(path, capsys, monkeypatch, options, line):
    monkeypatch.setattr(report_command.importlib.util, "find_spec", lambda name: None)
    assert run_cli(capsys, "report", path, *options) == (2, "", line)


def test_the_picture_is_a_png_of_timeline_and_layers(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="the picture needs the extra [report]")
    file = tmp_path / "fault.png"
    dump = edited(shutil.copytree(GOLDEN, tmp_path / GOLDEN.name), cause="costs $5 and $6")
    assert run_cli(capsys, "report", dump, "--png", file) == (0, f"{file}\n", "")
    data = file.read_bytes()
    width, height = (int.from_bytes(data[start : start + 4], "big") for start in (16, 20))
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and width == 1440 and 600 < height < 1500
    assert [each.name for each in tmp_path.iterdir() if each.suffix == ".html"] == [], "the picture alone was asked for"
