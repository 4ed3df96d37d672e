from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import OfflineModeIsEnabled
from kvpress_eval import evaluate, job
from kvpress_eval.cells import expand_tasks, make_cells
from kvpress_eval.config import RunConfig
from kvpress_eval.errors import ConfigError, DataError
from kvpress_eval.longbench import tasks
from kvpress_eval.longbench.data import Classified, Published, Question, read_rows, version_1
from kvpress_eval.longbench.subsets import CATEGORIES, CHOICE, EVEN, FORMS, averages
from kvpress_eval.longbench.tasks import LongBenchTask, cut_middle
from kvpress_eval.prompts import make_prompt
from kvpress_eval.report import write_outputs
from kvpress_eval.runner import run
from kvpress_eval.tasks import Sample, score
from kvpress_eval.yaml_config import load_config
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from tests.eval.content import content

WITHOUT_INPUT = {"gov_report", "multi_news", "vcsum", "passage_count", "lcc"}


def question(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "input": f"Question: How far is star {number}?\nType:",
        "context": "Question: Who wrote it?\nType: Human\n" * 5,
        "answers": ["Number"],
        "length": 4000 * number,
        "dataset": "trec",
        "language": "en",
        "all_classes": ["Number", "Human"],
        "_id": f"id{number}",
    } | fields


def choice(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "_id": f"id{number}",
        "domain": "Code Repository Understanding",
        "sub_domain": "Code repo QA",
        "difficulty": "hard",
        "length": "short",
        "question": " Which? ",
        **{f"choice_{letter}": f"{letter.lower()} " for letter in "ABCD"},
        "answer": "C",
        "context": "  def f(): ...\n",
    } | fields


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / "trec.jsonl", question(0), question(1))
    write(folder / "trec_e.jsonl", question(0), question(1), question(2), question(3))
    write(folder / "hotpotqa.jsonl", question(0, input="Why?", answers=["yes"], all_classes=None))
    write(folder / "longbench-v2.json", choice(0), choice(1, difficulty="easy", domain="Multi-Document QA"))
    return folder


def expand(name: str, folder: Path | None, *lengths: int) -> list[LongBenchTask]:
    sources = expand_tasks(RunConfig(tasks=(name,), lengths=lengths or (512,), data_dir=folder))
    return [source for source in sources if isinstance(source, LongBenchTask)]


def only(name: str, folder: Path, tokenizer: PreTrainedTokenizerBase, length: int = 4096) -> list[Sample]:
    (task,) = expand(name, folder, length)
    config = RunConfig()
    samples = task.samples(config, tokenizer)
    assert [sample.id for sample in samples] == task.sample_ids(config)
    return samples


def test_every_subset_has_a_form() -> None:
    assert len(FORMS) == 21
    assert len(EVEN) == 13
    assert set(EVEN) < set(FORMS)
    for name, form in FORMS.items():
        assert form.template.count("{context}") == 1
        assert form.before + "{context}" + form.after == form.template
        assert form.after.count("{input}") == (name not in WITHOUT_INPUT)
        assert "{" not in form.after.format(input="asked")
    listed = {subset for categories in CATEGORIES.values() for subsets in categories.values() for subset in subsets}
    assert listed == set(FORMS)


@pytest.mark.parametrize(
    ("subset", "said"),
    [
        ("qasper", ('"yes"', '"no"', '"unanswerable"')),
        ("hotpotqa", ("the answer alone",)),
        ("multifieldqa_zh", ("只写答案",)),
        ("trec", ("the name of the type alone",)),
        ("lsht", ("只写类别名称",)),
        ("passage_count", ("the number alone",)),
        ("passage_retrieval_en", ('"Paragraph 12"',)),
        ("passage_retrieval_zh", ("段落12",)),
    ],
)
def test_the_form_that_the_metric_needs_is_said(subset: str, said: tuple[str, ...]) -> None:
    assert all(words in FORMS[subset].template for words in said)


def test_a_context_is_split_from_what_is_asked(data: Path, byte_tokenizer: PreTrainedTokenizerBase) -> None:
    (sample,) = only("longbench:hotpotqa", data, byte_tokenizer)
    assert sample.context.startswith("Find the answer to a question in the passages.")
    assert sample.context.endswith("\nPassages:\n" + question(0)["context"])
    assert sample.query.question.endswith("\n\nQuestion: Why?\nAnswer:")
    prompt = make_prompt(byte_tokenizer, sample, question_aware=False)
    assert byte_tokenizer.decode(prompt.first + prompt.second) == sample.context + sample.query.question


def test_a_choice_is_asked_with_its_letters(data: Path, byte_tokenizer: PreTrainedTokenizerBase) -> None:
    sample = only("longbench-v2:hard", data, byte_tokenizer)[0]
    assert sample.context.endswith("\nText:\ndef f(): ...")
    assert sample.query.question.endswith("\n\nQuestion: Which?\n(A) a\n(B) b\n(C) c\n(D) d\nAnswer:")
    assert '"The correct answer is (letter)"' in sample.query.question
    assert score(sample.query, "The correct answer is (C)") == 1


def test_few_shot_prompts_stay_out_of_the_chat_template(data: Path, byte_tokenizer: PreTrainedTokenizerBase) -> None:
    byte_tokenizer.chat_template = "<user>{{ messages[0].content }}</user>"
    try:
        for name, chat in (("trec", False), ("hotpotqa", True)):
            sample = only(f"longbench:{name}", data, byte_tokenizer)[0]
            prompt = make_prompt(byte_tokenizer, sample, question_aware=False)
            whole = byte_tokenizer.decode(prompt.first + prompt.second)
            plain = sample.context + sample.query.question
            assert whole == (f"<user>{plain}</user>" if chat else plain)
    finally:
        byte_tokenizer.chat_template = None


def test_question_aware_prompts_answer_from_the_last_token(data: Path, byte_tokenizer: PreTrainedTokenizerBase) -> None:
    sample = only("longbench:trec", data, byte_tokenizer)[0]
    prompt = make_prompt(byte_tokenizer, sample, question_aware=True)
    assert byte_tokenizer.decode(prompt.first + prompt.second) == sample.context + sample.query.question
    assert byte_tokenizer.decode(prompt.second) == ":"


def test_long_prompts_lose_their_middle(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    # One token per character: the first and the last ten stay.
    assert cut_middle("abcdefghijklmnopqrstuvwxyz", "012345", 20, byte_tokenizer) == "abcdefghijwxyz"
    assert cut_middle("abcdefghijklmn", "012345", 20, byte_tokenizer) == "abcdefghijklmn"
    assert cut_middle("abcdefghijklmno", "012345", 20, byte_tokenizer) == "abcdefghijlmno"
    with pytest.raises(ValueError, match="length 20 is too short"):
        cut_middle("abcdefghijklmnopqrstuvwxyz", "01234567890", 20, byte_tokenizer)


def test_samples_never_exceed_the_length(data: Path, reference_tokenizer: PreTrainedTokenizerBase) -> None:
    whole = only("longbench:trec", data, reference_tokenizer)[0]
    longest = len(reference_tokenizer(whole.context + whole.query.question)["input_ids"]) - 20
    short = only("longbench:trec", data, reference_tokenizer, longest)[0]
    tokens = len(reference_tokenizer(short.context + short.query.question)["input_ids"])
    assert longest - 5 <= tokens <= longest
    assert short.query.question == whole.query.question


def test_metrics_know_their_subset(data: Path, byte_tokenizer: PreTrainedTokenizerBase) -> None:
    trec = only("longbench:trec", data, byte_tokenizer)[0]
    assert score(trec.query, "Number\nQuestion: Human") == 1
    assert score(trec.query, "Number Human") == 0.5
    (hotpotqa,) = only("longbench:hotpotqa", data, byte_tokenizer)
    assert score(hotpotqa.query, "Yes.\nSo") == pytest.approx(2 / 3)
    assert [task.max_new_tokens(RunConfig()) for task in expand("longbench:trec", data)] == [64]


def test_names_stand_for_rows(data: Path) -> None:
    def ids(name: str) -> list[str]:
        return [row.id for task in expand(name, data) for row in task.rows]

    assert ids("longbench:trec_e") == ["id0", "id1", "id2", "id3"]
    assert ids("longbench:trec_e:0-4k") == ["id0"]
    assert ids("longbench:trec_e:4-8k") == ["id1"]
    assert ids("longbench:trec_e:8k+") == ["id2", "id3"]
    assert ids("longbench-v2") == ["id0", "id1"]
    assert ids("longbench-v2:easy") == ids("longbench-v2:multi-document-qa") == ["id1"]
    with pytest.raises(DataError, match="no rows for longbench-v2:long "):
        expand("longbench-v2:long", data)
    with pytest.raises(DataError, match=r"narrativeqa\.jsonl"):
        expand("longbench:all", data)
    assert [task.length for task in expand("longbench:trec", data, 64, 128)] == [64, 128]


def test_a_subset_named_twice_runs_once(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "FORMS", {name: FORMS[name] for name in ("trec", "hotpotqa")})
    monkeypatch.setattr(tasks, "EVEN", ("trec",))
    config = RunConfig(tasks=("longbench:trec", "longbench:all"), lengths=(512,), data_dir=data)
    assert [source.task for source in expand_tasks(config)] == ["longbench:trec", "longbench:hotpotqa"]


def test_without_jieba_chinese_subsets_are_refused(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="longbench:dureader is scored by words that jieba separates"):
        expand("longbench:dureader", data)
    assert expand("longbench:trec", data)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("longbench:trek", "unknown subset of longbench 'trek': did you mean trec"),
        ("longbench:musique_e", "unknown subset of longbench"),
        ("longbench", "unknown subset of longbench ''"),
        ("longbench-v2:medum", "did you mean medium"),
    ],
)
def test_a_misspelt_name_is_refused(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        load_config(None, {"tasks": (name,)})


def test_lengths_are_asked_for(data: Path) -> None:
    with pytest.raises(ConfigError, match="longbench:trec needs lengths"):
        expand_tasks(RunConfig(tasks=("longbench:trec",), data_dir=data))


def test_yaml_names_the_folder(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"tasks: [niah_single, 'longbench:trec']\nlengths: [512]\ndata_dir: {data}\n")
    assert [source.task for source in expand_tasks(load_config(path, {}))] == ["niah_single", "longbench:trec"]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("{", r":2: not JSON"),
        ("", r":2: not JSON"),
        ("[]", r":2: not a LongBench row \(row: "),
        (json.dumps({"_id": "x"}), r":2: not a LongBench row \(context: Field required"),
        (json.dumps(question(1, answers=[])), r":2: not a LongBench row \(answers: "),
        (json.dumps(question(1, answers=["x", 1])), r":2: not a LongBench row \(answers\.1: "),
        (json.dumps(question(1, all_classes=None)), r":2: not a LongBench row \(all_classes: "),
        (json.dumps(question(0)), r":2: the _id 'id0' is that of .*trec\.jsonl:1 too"),
    ],
)
def test_a_damaged_line_is_named(data: Path, damage: str, problem: str) -> None:
    (data / "trec.jsonl").write_text(json.dumps(question(0)) + "\n" + damage + "\n")
    with pytest.raises(DataError, match=r"trec\.jsonl" + problem):
        expand("longbench:trec", data)


def test_bytes_that_are_no_text_are_refused(data: Path) -> None:
    (data / "trec.jsonl").write_bytes(b'{"input": "\xff"}\n')
    with pytest.raises(DataError, match=r"trec\.jsonl:1: not JSON"):
        expand("longbench:trec", data)


def test_line_separators_inside_a_text_do_not_end_a_row(data: Path) -> None:
    write(data / "trec.jsonl", question(0, context="one\u2028two\x85three"))
    (task,) = expand("longbench:trec", data)
    assert task.rows[0].context == "one\u2028two\x85three"


def test_version_2_is_one_array_as_published(data: Path) -> None:
    lines = expand("longbench-v2", data)[0]
    (data / "longbench-v2.json").write_text(json.dumps([choice(0), choice(1, difficulty="easy")], indent=1))
    array = expand("longbench-v2", data)[0]
    assert [row.id for row in array.rows] == [row.id for row in lines.rows]
    (data / "longbench-v2.json").write_text(json.dumps([choice(0), choice(1, answer="E")]))
    with pytest.raises(DataError, match=r"longbench-v2\.json: row 2: not a LongBench row \(answer: "):
        expand("longbench-v2", data)


def test_a_missing_file_says_what_to_place_where(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        expand("longbench:qasper", tmp_path)
    message = str(error.value)
    assert f"place it at {tmp_path}/qasper.jsonl" in message
    assert "data/qasper.jsonl in data.zip of https://huggingface.co/datasets/zai-org/LongBench at 5e628be" in message
    assert "_id, context, input, answers, length, all_classes" in message


def test_without_network_the_message_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(url: str, timeout: float) -> None:
        assert url.startswith("https://huggingface.co/datasets/zai-org/LongBench-v2/resolve/2b48e494")
        raise OfflineModeIsEnabled("offline\nand more")

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *place, **which: None)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", fail)
    with pytest.raises(
        DataError, match=r"\(offline\); .* place it at FOLDER/longbench-v2\.json: .* choice_A, choice_B"
    ):
        expand("longbench-v2", None)


def test_a_subset_comes_from_the_archive(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w") as members:
        members.write(data / "trec.jsonl", "data/trec.jsonl")
    file = replace(version_1("trec", Classified).file, sha256=hashlib.sha256(archive.read_bytes()).hexdigest())
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *place, **which: str(archive))
    from_hub, from_folder = (read_rows(Published(file, Classified), folder) for folder in (None, data))
    assert (from_hub.rows, from_hub.sha256) == (from_folder.rows, from_folder.sha256)
    with pytest.raises(DataError, match=r"cannot fetch data/lcc\.jsonl in data\.zip"):
        read_rows(Published(replace(file, member="data/lcc.jsonl"), Question), None)


def cell_ids(config: RunConfig) -> list[str]:
    return [cell.id for cell in make_cells(config, expand_tasks(config), "w", "cpu", "bfloat16")]


def test_a_cell_is_named_by_the_data(data: Path, tmp_path: Path) -> None:
    config = RunConfig(tasks=("longbench:trec",), lengths=(512,), data_dir=data)
    base = cell_ids(config)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "trec.jsonl").write_bytes((data / "trec.jsonl").read_bytes())
    assert cell_ids(config.model_copy(update={"data_dir": elsewhere})) == base
    assert cell_ids(config.model_copy(update={"seed": 1, "language": "english"})) == base
    assert cell_ids(config.model_copy(update={"max_new_tokens": 64})) == base
    for change in ({"lengths": (513,)}, {"max_new_tokens": 8}):
        assert cell_ids(config.model_copy(update=change)) != base
    write(data / "trec.jsonl", question(0), question(1, answers=["Human"]))
    assert cell_ids(config) != base


@pytest.fixture
def tiny(data: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    def build(**fields: Any) -> RunConfig:
        defaults = {"tasks": ("longbench:trec",), "lengths": (96,), "data_dir": data, "threads": 1, "samples": 2}
        return RunConfig(**{**defaults, "presses": ("none", "random:0.5"), "out": tmp_path / "run", **fields})

    return build


def test_a_run_has_a_row_per_sample(data: Path, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    rows = evaluate(
        "reference",
        ["none", "random:0.5"],
        ["longbench:trec", "niah_single"],
        lengths=[96],
        samples=2,
        data_dir=data,
        threads=1,
        out=tmp_path / "run",
    )
    assert isinstance(rows, pandas.DataFrame)
    ours = rows[rows["task"] == "longbench:trec"]
    assert ours["sample"].tolist() == [f"longbench:trec-96-id{number}" for number in (0, 1)] * 2
    assert set(ours["status"]) == {"ok"}
    assert ours["score"].between(0, 1).all()
    assert all(expected == ["Number"] for expected in ours["expected"])
    assert ours["context_tokens"].between(60, 96).all()
    assert (ours["new_tokens"] <= 64).all()
    kept = ours.groupby("press")["kept"].mean()
    assert kept["none"] == 1
    assert kept["random:0.5"] == pytest.approx(0.5, abs=0.02)


def test_a_stopped_run_continues(
    tiny: Callable[..., RunConfig], tmp_path: Path, quiet: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tiny(samples=1), quiet)
    continued = run(tiny(), quiet)
    whole = tiny(out=tmp_path / "whole")
    run(whole, quiet)
    assert continued.exit_code == 0
    assert content(tiny()) == content(whole)
    monkeypatch.setattr(job, "read_contexts", None)
    assert run(tiny(), quiet).exit_code == 0


def test_a_question_aware_run_shows_what_it_kept(tiny: Callable[..., RunConfig], quiet: Console) -> None:
    config = tiny(question_aware=True, samples=1, max_new_tokens=4)
    result = run(config, quiet)
    assert result.exit_code == 0
    report, *_ = write_outputs([config.out], config.out / "report.html")
    assert "How far is star 0?" in report.read_text()


def test_categories_average_what_ran_in_full() -> None:
    scores: dict[str, float | None] = {"longbench:lcc": 0.2, "longbench:repobench-p": 0.4, "longbench:qasper": 0.5}
    assert averages(scores) == {"longbench en code": pytest.approx(0.3), "longbench zh code": pytest.approx(0.3)}
    every = {f"longbench:{subset}": 0.5 for subset in FORMS} | scores
    found = averages(every)
    assert len(found) == 14
    # Six categories weigh the same, however many subsets they have.
    assert found["longbench en"] == pytest.approx((5 * 0.5 + 0.3) / 6)
    assert averages(every | {"longbench:trec": None})["longbench en"] is None
    assert averages({"vt": 1.0}) == {}


def published(folder: Path, **templates: Any) -> None:
    (folder / "dataset2prompt.json").write_text(json.dumps(templates), encoding="utf-8")


VERSION_2 = "In {x}: <$DOC$> what is $Q$ of $C_A$, $C_B$, $C_C$ and $C_D$? {}\n"


def test_the_published_wording_is_used_where_it_is(data: Path, byte_tokenizer: PreTrainedTokenizerBase) -> None:
    context = "{braces} stay"
    write(data / "trec.jsonl", question(0, context=context, input="{input} too"))
    write(data / "trec_e.jsonl", question(0, context=context, input="{input} too"))
    published(data, trec="Types, 类:\n{context}\n=> {input}!")
    for name in ("longbench:trec", "longbench:trec_e", "longbench:trec_e:0-4k"):
        (sample,) = only(name, data, byte_tokenizer)
        assert sample.context == "Types, 类:\n" + context
        assert sample.query.question == "\n=> {input} too!"
        assert not sample.query.chat
        assert score(sample.query, "Number\nQuestion") == 1
    assert only("longbench-v2:hard", data, byte_tokenizer)[0].context.startswith(CHOICE.before)


def test_the_published_wording_of_version_2_has_its_own_marks(
    data: Path, byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    published(data)
    (data / "longbench-v2-prompt.txt").write_text(VERSION_2)
    sample = only("longbench-v2:hard", data, byte_tokenizer)[0]
    assert sample.context == "In {x}: <def f(): ..."
    assert sample.query.question == "> what is Which? of a, b, c and d? {}\n"


def test_a_cell_is_named_by_the_wording(data: Path) -> None:
    def wording(name: str) -> str:
        (task,) = expand(name, data)
        return str(task.identity(RunConfig())["wording"])

    config = RunConfig(tasks=("longbench:trec", "longbench-v2"), lengths=(512,), data_dir=data)
    assert (wording("longbench:trec"), wording("longbench-v2")) == ("kvpress", "kvpress")
    ours = cell_ids(config)
    # Even the same words: the cell says which file they are from.
    published(data, trec=FORMS["trec"].template)
    (data / "longbench-v2-prompt.txt").write_text(VERSION_2)
    theirs = cell_ids(config)
    assert not set(ours) & set(theirs)
    for name, file in (("longbench:trec", "dataset2prompt.json"), ("longbench-v2", "longbench-v2-prompt.txt")):
        assert wording(name) == f"{file} sha256:{hashlib.sha256((data / file).read_bytes()).hexdigest()}"
    published(data, trec="Now {context} {input}")
    assert cell_ids(config)[0] != theirs[0]
    assert cell_ids(config)[1] == theirs[1]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "trec: not JSON"),
        ("[]", "no template for trec: "),
        ("{}", "no template for trec: "),
        ('{"trec": 1}', "no template for trec: "),
        ('{"trec": "{context}"}', r"trec: the template lacks \{input\}; it takes \{context\}, \{input\}, each once"),
        ('{"trec": "{input}"}', r"trec: the template lacks \{context\};"),
        ('{"trec": "{context} {input!r}"}', r"trec: the template lacks \{input\};"),
        ('{"trec": "{input} {context}"}', r"trec: the template has \{input\}, \{context\};"),
        ('{"trec": "{context} {context} {input}"}', r"trec: the template has \{context\}, \{context\}, \{input\};"),
        ('{"trec": "{context} {input} {length}"}', r"trec: the template has .*\{length\};"),
        ('{"trec": "{context} {input} {"}', "trec: not a template "),
    ],
)
def test_a_damaged_wording_is_named(data: Path, text: str, problem: str) -> None:
    (data / "dataset2prompt.json").write_text(text)
    with pytest.raises(DataError, match=r"dataset2prompt\.json: " + problem):
        expand("longbench:trec", data)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (VERSION_2.replace("$C_B$", "$C_E$").encode(), r"the template lacks \$C_B\$; it takes \$DOC\$, \$Q\$, "),
        (b"", r"the template lacks \$DOC\$, \$Q\$, \$C_A\$, \$C_B\$, \$C_C\$, \$C_D\$;"),
        (VERSION_2.replace("$C_A$", "$C_B$ $C_A$").encode(), r"the template has .*\$C_B\$, \$C_A\$, \$C_B\$"),
        (b"\xff", "not UTF-8"),
    ],
)
def test_a_damaged_wording_of_version_2_is_named(data: Path, text: bytes, problem: str) -> None:
    (data / "longbench-v2-prompt.txt").write_bytes(text)
    with pytest.raises(DataError, match=r"longbench-v2-prompt\.txt: longbench-v2: " + problem):
        expand("longbench-v2", data)


def test_a_wording_that_cannot_be_read_is_refused(data: Path) -> None:
    (data / "dataset2prompt.json").mkdir()
    with pytest.raises(DataError, match=r"cannot read .*dataset2prompt\.json"):
        expand("longbench:trec", data)
