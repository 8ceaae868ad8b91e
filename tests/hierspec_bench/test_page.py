"""The page of a bench record: well formed, complete, nothing loaded, nothing run that came in with a text."""

from __future__ import annotations

import copy
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_record import RESULTS, made_up_record

from hierspec.core.errors import HierspecError
from hierspec_bench.page import report_page as page_of_record
from hierspec_bench.page import write_report
from hierspec_bench.page.__main__ import main
from hierspec_bench.page.charts import column_chart
from hierspec_bench.record import PLAN, Entry, Record

_VOID = {"meta", "link", "br"}
_BENCH = sorted(path for path in RESULTS.glob("*.json") if isinstance(json.loads(path.read_text()).get("plans"), dict))


def report_page(document: dict) -> str:
    return page_of_record(Record.of(document))


class _Tree(HTMLParser):
    """Elements in order with their text; complains when tags do not pair."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[dict] = []
        self._open: list[dict] = []
        self.feed(page)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attributes):
        element = {"tag": tag, "attributes": dict(attributes), "text": "", "inside": list(self._open)}
        assert len(dict(attributes)) == len(attributes)
        self.elements.append(element)
        if tag not in _VOID:
            self._open.append(element)

    def handle_endtag(self, tag):
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop()["tag"] == tag

    def handle_data(self, data):
        for element in self._open:
            element["text"] += data

    def all(self, tag: str = "", **wanted: str) -> list[dict]:
        return [
            element
            for element in self.elements
            if (not tag or element["tag"] == tag)
            and all(
                value in (element["attributes"].get(key.rstrip("_")) or "").split() for key, value in wanted.items()
            )
        ]

    def within(self, outer: dict, tag: str = "", **wanted: str) -> list[dict]:
        return [element for element in self.all(tag, **wanted) if any(outer is one for one in element["inside"])]

    def one(self, tag: str = "", **wanted: str) -> dict:
        found = self.all(tag, **wanted)
        assert len(found) == 1, (tag, wanted, len(found))
        return found[0]


def _small(name: str = "lookup", text: str = "x") -> dict:
    """A record with a text of one's choice in every place that holds text."""
    figures = {
        "prompts": 2,
        "identical": 1,
        "ties": 0,
        "tokens": 9,
        "seconds": 1.5,
        "speedup": 1.25,
        "tokens_per_second": 6.0,
        "speedup_interval": [1.1, 1.4],
        "differences": [text],
        "tiers": [
            {
                "tier": text,
                "calls": 3,
                "proposed": {text: 4},
                "accepted": {text: 2},
                "proposed_by_depth": [3, 1],
                "accepted_by_depth": [1, 1],
                "seconds": 1.0,
            }
        ],
        "tasks": {text: {"speedup": 1.25}},
        "outliers": [{"prompt": 0, "task": text, "tokens_per_second": 1.0, "usual": 2.0}],
        "law": {"statistic": 1.0, "p": 0.5, "tokens": 9, "method": text},
    }
    about = {
        "version": text,
        "note": text,
        "setting": {text: text},
        "searched": [{"setting": {text: text}, "tokens_per_second": 2.0}],
    }
    return {
        "command": text,
        "model": text,
        "machine": {"processor": text},
        "prompts": {"name": text, "count": 2},
        "plans": {"plain": dict(figures), name: figures},
        "peers": {"peer " + name: {**figures, "about": about}},
        "absent_peers": {text: text},
        "bandwidth": {"method": text},
        "texts": [{"prompt": 0, "task": text, "asked": text, "answers": {name: [[text, "copy"], ["b", "target"]]}}],
    }


@pytest.fixture(scope="module")
def record() -> dict:
    return made_up_record()


@pytest.fixture(scope="module")
def tree(record) -> _Tree:
    return _Tree(report_page(record))


@pytest.mark.parametrize("path", _BENCH, ids=lambda path: path.stem)
def test_records_of_older_runs_are_shown_with_their_figures(path):
    record = json.loads(path.read_text(encoding="utf-8"))
    tree = _Tree(report_page(record))
    chart = tree.within(tree.one("section", id="speed"), "ul", class_="bars")[0]
    rows = [row for row in tree.within(chart, "li") if not row["attributes"].get("class")]
    shown = [tree.within(row, "span", class_="value")[0]["text"] for row in rows]
    for text, figures in zip(shown, [*record["plans"].values(), *record["peers"].values()], strict=True):
        assert text.startswith(f"{figures['speedup']:.2f}×")


def test_the_table_holds_the_figures_of_the_record(record, tree):
    table = tree.within(tree.one("section", id="rates"), "table")[0]
    heads = [head["text"] for head in tree.within(table, "th", scope="col")]
    keys = {
        "tokens/s": "tokens_per_second",
        "speed-up": "speedup",
        "prefill s": "prefill_seconds",
        "GB/s": "gigabytes_per_second",
    }
    rows = tree.within(table, "tr")[1:]
    entries = {**record["plans"], **record["peers"]}
    assert len(rows) == len(entries)
    for row, figures in zip(rows, entries.values(), strict=True):
        cells = [cell["text"] for cell in tree.within(row) if cell["tag"] in ("td", "th")]
        for head, key in keys.items():
            cell = cells[heads.index(head)]
            assert cell == "–" if key not in figures else float(cell.replace(",", "")) == figures[key]


def test_the_sentence_names_the_fastest_plan_and_the_fastest_other_engine(record, tree):
    best = max(
        (name for name in record["plans"] if name != "plain"),
        key=lambda name: record["plans"][name]["tokens_per_second"],
    )
    peer = max(record["peers"], key=lambda name: record["peers"][name]["tokens_per_second"])
    plan = record["plans"][best]
    ratio = plan["tokens_per_second"] / record["peers"][peer]["tokens_per_second"]
    words = tree.one("h1")["text"]
    for part in (
        f" {best},",
        f"{plan['speedup']:.2f}× ",
        f"{ratio:.2f}× ",
        f" {peer};",
        f"{plan['identical']} of {plan['prompts']} outputs",
    ):
        assert part in words


def test_every_part_of_the_record_has_its_section(record, tree):
    ids = [section["attributes"]["id"] for section in tree.all("section")]
    assert ids == ["speed", "text", "rates", "temperatures", "time", "guesses", "same", "outliers", "peers"]
    whole = tree.one("body")["text"]
    for text in (
        *record["absent_peers"].values(),
        record["files"]["model.safetensors"],
        record["command"],
        "11.5",
        "1.2e-06",
    ):
        assert text in whole
    for image in tree.all("svg", role="img"):
        assert tree.within(image, "title")[0]["text"].strip()
    assert not {"img", "iframe", "object", "form", "base"} & {element["tag"] for element in tree.elements}


def test_time_parts_of_a_plan_add_up_to_its_bar(record, tree):
    figures = record["plans"]["draft"]
    chart = tree.within(tree.one("section", id="time"), "ul", class_="bars")[0]
    row = next(row for row in tree.within(chart, "li") if tree.within(row, "span", class_="name")[0]["text"] == "draft")
    parts = tree.within(row, "rect")
    titles = [tree.within(part, "title")[0]["text"] for part in parts]
    assert [title.split(":")[0] for title in titles] == ["drafting", "verifying", "picking", "stores", "other"]
    for title, seconds in zip(titles, figures["time"].values(), strict=True):
        assert title.endswith(f": {1e3 * seconds / figures['tokens']:.3g} ms a token")
    widths = [float(part["attributes"]["width"].rstrip("%")) for part in parts]
    shares = [seconds / sum(figures["time"].values()) for seconds in figures["time"].values()]
    assert widths == pytest.approx([share * sum(widths) for share in shares], abs=0.02)


def test_nothing_outside_is_named(record):
    page = report_page(record)
    tree = _Tree(page)
    loading = {"src", "href", "xlink:href", "action", "srcset", "poster", "style", "data"}
    assert [
        (element["tag"], element["attributes"][key])
        for element in tree.elements
        for key in loading & set(element["attributes"])
    ] == [("link", "data:,")]
    assert "http" not in page.replace("http-equiv", "")
    assert "@import" not in page
    assert set(re.findall(r"url\(([^)]*)\)", page)) == {"#hatch"}
    policy = tree.one("meta", **{"http-equiv": "Content-Security-Policy"})["attributes"]["content"]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy


_HOSTILE = st.one_of(
    st.text(min_size=1),
    st.sampled_from(
        [
            "<script>alert(1)</script>",
            '"><img src=x onerror=alert(1)>',
            "</title></style></script><b>",
            "<!--",
            "]]>",
            "&amp;lt;",
            "' onload='x",
            "\x00",
            "\ud800",
            "\r\n",
        ]
    ),
)


def _shape(tree: _Tree) -> list[tuple[str, tuple[str, ...]]]:
    return [(element["tag"], tuple(element["attributes"])) for element in tree.elements]


_HARMLESS = _shape(_Tree(report_page(_small())))


@settings(max_examples=30, deadline=None)
@given(text=_HOSTILE)
def test_no_text_becomes_markup(text):
    page = report_page(_small(text=text))
    page.encode("utf-8")
    tree = _Tree(page)
    assert _shape(tree) == _HARMLESS
    words = tree.one("div", class_="words")["text"]
    allowed = re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufdd0-\ufdef\ufffe\uffff\ud800-\udfff]", "�", text)
    assert words == allowed + "b"


@settings(max_examples=20, deadline=None)
@given(name=_HOSTILE.filter(lambda name: name != "plain" and ", batch of " not in name))
def test_no_name_of_a_plan_becomes_markup(name):
    assert _shape(_Tree(report_page(_small(name=name)))) == _HARMLESS


def _without(document: object, path: tuple) -> object:
    """A copy that lacks the key at the path."""
    document = copy.deepcopy(document)
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return document


def _paths(document: object, before: tuple = ()) -> list[tuple]:
    if isinstance(document, dict):
        return [path for key, value in document.items() for path in ((*before, key), *_paths(value, (*before, key)))]
    if isinstance(document, list):
        return [path for place, value in enumerate(document) for path in _paths(value, (*before, place))]
    return []


@pytest.mark.parametrize("path", [path for path in _paths(_small()) if path != ("plans",)], ids=str)
def test_any_key_may_be_missing(path):
    _Tree(report_page(_without(_small(), path)))


@settings(max_examples=40, deadline=None)
@given(
    path=st.sampled_from([path for path in _paths(_small()) if path != ("plans",)]),
    value=st.one_of(st.none(), st.booleans(), st.floats(), st.text(), st.just([]), st.just({}), st.just([[], {}])),
)
def test_any_value_may_be_odd(path, value):
    document = _small()
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    _Tree(report_page(document))


def test_partial_and_synthetic_runs_are_marked(record):
    whole = _Tree(report_page(record))
    assert not whole.all("p", class_="warning")
    marked = _Tree(report_page({**record, "complete": False, "prompts_done": 7, "synthetic": True}))
    partial, synthetic = (mark["text"] for mark in marked.all("p", class_="warning"))
    assert partial.startswith("Partial")
    assert "7 of 18 prompts" in partial
    assert synthetic.startswith("Synthetic")


def test_a_slow_plan_is_not_praised():
    record = _small()
    record["plans"]["lookup"] |= {"speedup": 0.8}
    assert _Tree(report_page(record)).one("h1")["text"].startswith("No plan is faster than plain decoding")
    del record["plans"]["lookup"]
    assert "no plan to compare" in _Tree(report_page(record)).one("h1")["text"]


def test_only_the_first_text_shows_without_script(record, tree):
    answers = tree.all("article", class_="answer")
    assert len(answers) == len(record["texts"]) * len(record["plans"])
    shown = [answer for answer in answers if "hidden" not in answer["attributes"]]
    assert len(shown) == 1
    pieces = record["texts"][0]["answers"]["eagle+"]
    assert tree.within(shown[0], "div", class_="words")[0]["text"] == "".join(text for text, _, _ in pieces)
    for run in tree.within(shown[0], "span", class_="run"):
        assert run["attributes"].get("title") or run["attributes"].get("aria-hidden")


def test_any_prompt_can_be_chosen_and_older_records_count_a_token_a_piece(record):
    old = {
        **record,
        "texts": [
            {**text, "answers": {"plain": [["a", "target"], ["b", "target"], ["c", "copy"]]}}
            for text in record["texts"]
        ],
    }
    tree = _Tree(report_page(old))
    assert [
        run["attributes"]["title"]
        for run in tree.all("span", class_="run")
        if run["text"] == "ab" and "title" in run["attributes"]
    ] == ["the model itself, 2 tokens"] * len(record["texts"])
    assert len(tree.within(tree.all("select")[0], "option")) == len(record["texts"])
    assert tree.all("option")[1]["text"].startswith("qa 1: Why is the sky blue?")


def _rows_named(tree, name):
    """Cells after the first of all table rows that this is the first cell of."""
    rows = [tree.within(row) for row in tree.all("tr")]
    return [[cell["text"] for cell in row if cell["tag"] == "td"] for row in rows if row[0]["text"] == name]


def test_our_plan_is_set_against_the_fastest_other_engine_of_every_task(record):
    rows = _rows_named(_Tree(report_page(record)), "all prompts")
    best = max(record["plans"].values(), key=lambda one: one["tokens_per_second"])["tokens_per_second"]
    peer = max(record["peers"].values(), key=lambda one: one["tokens_per_second"])["tokens_per_second"]
    assert [f"{best / peer:.2f}×", "", "ahead", f"{best:.1f}", f"{peer:.1f}", "openvino"] in rows
    slow = copy.deepcopy(record)
    for figures in slow["peers"].values():
        figures["tasks"]["qa"]["tokens_per_second"] = 1e3
    [row] = [row for row in _rows_named(_Tree(report_page(slow)), "qa") if "behind" in row]
    assert row[4] == "1,000.0"
    alone = {**record, "peers": {}}
    assert not _rows_named(_Tree(report_page(alone)), "all prompts")


def test_rounded_weights_and_failed_settings_are_told(record):
    assert "Rounded weights" not in report_page(record)
    failed = copy.deepcopy(record)
    failed["weights"] = "int8"
    failed["peers"]["openvino"]["about"]["searched"].append(
        {"setting": {"precision": "f16"}, "error": "No such thing."}
    )
    page = report_page(failed)
    assert "weights rounded to int8, plain decoding too" in page
    assert "Other engines run the weights" in page
    assert "No such thing." in page


def test_the_command_writes_a_page_or_says_why_not(tmp_path, capsys):
    page = tmp_path / "report.html"
    assert main([str(_BENCH[0]), str(page)]) == 0
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert main([str(tmp_path / "absent.json"), str(page)]) == 1
    assert main([str(RESULTS / "plan-default.json"), str(page)]) == 1  # plans in a list: another kind of record
    assert "not a bench record" in capsys.readouterr().err
    assert main([]) == 2
    with pytest.raises(HierspecError, match="not a bench record"):
        write_report(Record.of({}), Path(tmp_path / "other.html"))


def test_the_interval_of_a_ratio():
    def entry(*seconds, **changes):
        rows = [
            {"prompt": place, "repeat": 0, "task": "qa" if place else "rag", "tokens": 10, "seconds": one} | changes
            for place, one in enumerate(seconds)
        ]
        return Entry.of("a", PLAN, {"by_prompt": rows})

    assert entry(1.0, 1.0, 1.0).interval_over(entry(2.0, 2.0, 2.0)) == (2.0, 2.0)
    low, high = entry(1.0, 1.0, 1.0).interval_over(entry(1.0, 2.0, 3.0))
    assert 1.0 <= low < 2.0 < high <= 3.0
    assert entry(1.0, 1.0, 1.0).interval_over(entry(9.0, 2.0, 2.0), "qa") == (2.0, 2.0)
    assert entry(1.0).interval_over(Entry("old", PLAN)) is None
    assert entry(1.0).interval_over(entry(1.0, seconds="long")) is None


def test_a_wide_tree_does_not_flatten_what_was_accepted():
    """A column is at most as high as the chart, with its size above."""
    tree = _Tree(column_chart("told", [7.25, 0.5], [0.5, 0.25], 1.0, "accepted"))
    heights = [float(one["attributes"]["height"]) for one in tree.all("rect")]
    assert heights == [92.0, 46.0, 46.0, 23.0]
    assert [one["text"] for one in tree.all("text")] == ["1", "7.2", "2"]
