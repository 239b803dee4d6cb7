"""Reports as tables, Markdown and pictures, again and side by side."""

import json

import pytest
from rich.console import Console

from train.compile.command import show_report
from train.compile.compare import compare_views
from train.compile.pictures import draw_report, memory_parts, time_parts
from train.compile.views import (
    View,
    markdown_document,
    milliseconds,
    read_report,
    report_views,
)


def kind(name, seconds, count=3):
    return {
        "kind": name,
        "count": count,
        "bytes": 5000,
        "modelled_s": seconds,
        "compiler_s": 2 * seconds,
    }


def report(**changes):
    return {
        "preset": "small",
        "topology": "v6e-8",
        "fits": True,
        "memory": {
            "argument": 4 << 30,
            "output": 3 << 30,
            "alias": 2 << 30,
            "temp": 6 << 30,
            "code": 1 << 30,
            "peak": 12 << 30,
            "available": 31 << 30,
        },
        "largest_buffers": [
            {"name": "loss: mm", "shape": "bf16[2,1024]", "bytes": 10**9, "count": 16}
        ],
        "collectives": [
            {
                "kind": "all-gather",
                "count": 30,
                "bytes": 10**9,
                "num_asynchronous": 8,
                "link_s": 0.5,
            }
        ],
        "time_by_kind": [kind("attention", 0.25), kind("norms", 0.125)],
        "kernels": [
            {
                "name": "gmm",
                "shapes": "bf16[8,16]",
                "count": 60,
                "modelled_s": 0.1,
                "source": "static schedule at random routing",
            }
        ],
        "routing": "each of 8 tokens",
        "modelled_step_s": 0.375,
        "rerun_s": 0.0625,
        "recompute": {
            "policy": "save_attention",
            "flops": 2 * 10**12,
            "counted_flops": 8 * 10**12,
            "kept_bytes": 10**9,
        },
        "modelled_tokens_per_s": 1000.0,
        "modelled_mfu": 0.25,
        "unknowns": ["waits", "a | b"],
        "flags": [{"name": "xla_a", "value": "1", "reason": "why not"}],
        "versions": {"libtpu": "0.0.21"},
        "config": {"mesh": {"fsdp": 8}, "recompute": "full"},
    } | changes


REFUSED = report(
    fits=False,
    memory={"peak": 38 << 30, "available": 31 << 30, "exceeded": 7 << 30},
    remedies=[{"options": "--recompute full", "saved_bytes": 10**10, "because": "layers"}],
    collectives=[],
    time_by_kind=[],
    kernels=[],
    modelled_step_s=None,
    modelled_mfu=None,
)


def rows(views, title):
    (view,) = [view for view in views if view.title.startswith(title)]
    return {row[0]: row[1:] for row in view.rows}


def test_every_part_of_a_report_is_told():
    views = report_views(report())
    assert rows(views, "small on v6e-8: fits")["peak"] == ("12.88 GB",)
    again = rows(views, "Recomputation")
    assert again["policy"] == ("save_attention",)
    assert again["kept by layers for the backward pass, by arithmetic"] == ("1.00 GB",)
    assert again["FLOPs run again, by arithmetic"] == ("2 TFLOP, 25.0% of those counted",)
    assert again["modelled ms of layers run again, in the step below"] == ("62.5",)
    assert rows(views, "Largest buffers")["loss: mm"] == ("bf16[2,1024]", "16", "1.00 GB")
    assert rows(views, "Collectives")["all-gather"] == ("30", "1.00 GB", "8", "500.0")
    times = rows(views, "Modelled time")
    assert times["attention"] == ("3", "5 kB", "250.0", "500.0")
    assert times["modelled step"] == ("", "", "375.0", "")
    assert "as 1,000 tokens/s a chip, MFU 25.0%" in times
    assert rows(views, "Kernels")["gmm"] == (
        *("bf16[8,16]", "60", "100.0", "static schedule at random routing"),
    )
    (kernels,) = (view for view in views if view.title.startswith("Kernels"))
    assert kernels.title.endswith("; random routing: each of 8 tokens")
    assert rows(views, "Compiler flags")["xla_a"] == ("1", "why not")
    assert "waits" in rows(views, "Not known")
    assert not any(view.title.startswith("What would help") for view in views)


def test_a_refusal_is_told_with_its_remedies():
    views = report_views(REFUSED)
    assert rows(views, "small on v6e-8: DOES NOT FIT")["exceeded"] == ("7.52 GB",)
    assert rows(views, "What would help")["--recompute full"] == ("10.00 GB", "layers")
    assert not any(view.title.startswith(("Modelled", "Collectives")) for view in views)


def test_markdown_has_tables_lists_and_pictures():
    text = markdown_document("Title", report_views(report()), ["time_by_kind.png"])
    assert text.startswith(
        "# Title\n\n![time by kind](time_by_kind.png)\n\n## small on v6e-8: fits\n"
    )
    assert "|  | executed | bytes | asynchronous | link ms |\n|---|---:|---:|---:|---:|\n" in text
    assert "| all-gather | 30 | 1.00 GB | 8 | 500.0 |\n" in text
    assert "- waits\n- a \\| b\n" in text
    assert text.endswith("|\n") and "\n\n\n" not in text


def test_cells_cannot_break_a_markdown_table():
    view = View("t", ("", "x|y"), (("a|b", "c"),))
    assert view.markdown() == "## t\n\n|  | x\\|y |\n|---|---:|\n| a\\|b | c |\n"


def test_two_reports_side_by_side():
    faster = report(
        topology="v6e-16",
        memory=report()["memory"] | {"temp": 3 << 30, "code": 1 << 30},
        collectives=[{"kind": "all-reduce", "count": 2, "bytes": 10, "num_asynchronous": 0}],
        time_by_kind=[kind("attention", 0.5), kind("sorts", 0.0)],
        modelled_step_s=0.5,
        config={"mesh": {"fsdp": 16}, "recompute": "full"},
    )
    views = compare_views(report(), faster, ("before", "after"))
    assert rows(views, "What differs") == {
        "topology": ("v6e-8", "v6e-16"),
        "mesh.fsdp": ("8", "16"),
    }
    memory = rows(views, "HBM")
    assert memory["temp"] == ("6.44 GB", "3.22 GB", "-3.22 GB (-50.0 %)")
    assert memory["code"] == ("1.07 GB", "1.07 GB", "same")
    gathered = rows(views, "Collectives of a step: bytes")
    assert gathered["all-gather"] == ("1.00 GB", "-", "-1.00 GB (-100.0 %)")
    assert gathered["all-reduce"] == ("-", "10 B", "+10 B")
    assert rows(views, "Collectives of a step: executions")["all-gather"] == (
        *("30", "-", "-30 (-100.0 %)"),
    )
    times = rows(views, "Modelled ms")
    assert times["attention"] == ("250.0", "500.0", "+250.0 (+100.0 %)")
    assert times["modelled step"] == ("375.0", "500.0", "+125.0 (+33.3 %)")


def test_a_refusal_beside_a_report():
    times = rows(compare_views(report(), REFUSED, ("a", "b")), "Modelled ms")
    assert times["modelled step"] == ("375.0", "unknown", "unknown")
    same = compare_views(report(), report(), ("a", "b"))
    assert not any(view.title == "What differs" for view in same)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.2345, "1,234.5"), (0.01, "10.0"), (0.0000123, "0.012"), (0.0, "0.000"), (None, "unknown")],
)
def test_milliseconds(seconds, text):
    assert milliseconds(seconds) == text


def test_pictures(tmp_path):
    assert draw_report(report(), tmp_path) == ["memory.png", "time_by_kind.png"]
    for name in ("memory.png", "time_by_kind.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert draw_report(REFUSED, tmp_path) == ["memory.png"]


def test_what_pictures_show():
    memory = report()["memory"]
    assert sum(memory_parts(memory).values()) == memory["peak"]
    assert memory_parts(REFUSED["memory"]) == {"all of it": 38 << 30}
    many = report(time_by_kind=[kind(f"k{i}", i / 100) for i in range(20)])
    parts = time_parts(many)
    assert next(iter(parts)) == "k19" and len(parts) == 16
    assert parts["the rest"] == pytest.approx(sum(range(5)) / 100)
    assert sum(parts.values()) == pytest.approx(sum(range(20)) / 100)


def test_a_report_is_read_back_and_shown(tmp_path):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report()))
    assert read_report(str(path)) == report()
    console = Console(record=True, width=100)
    show_report(str(path), console=console)
    assert "small on v6e-8: fits" in console.export_text()
    show_report(str(path), str(path), console=console)
    assert "same" in console.export_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "not JSON; give a report.json that python -m train compile wrote"),
        ("[]", "has no preset, topology, fits"),
        ('{"preset": "a", "fits": true}', "has no topology, memory, collectives, time_by_kind"),
        (None, "No such file or directory; give a report.json"),
    ],
)
def test_files_that_are_no_report(tmp_path, text, message):
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=rf"report = '{path}': {message}"):
        read_report(str(path))
