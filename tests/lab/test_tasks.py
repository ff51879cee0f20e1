"""lm-eval on a base and its result (train --base --tasks) and on the trainings of a study."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import moescope
from decoder.tiny_lab import tiny, trained
from lab.existing_models import saved
from lab.test_existing import settings
from lab.tiny_study import write_study
from moescope.decoder.saving import load_model
from moescope.decoder.vocabulary import Bytes
from moescope.errors import BadInput
from moescope.lab.tasks import (
    harness_model,
    load_tasks,
    paired_error,
    run_harness,
    score_tasks,
    study_tasks,
    tasks_identity,
)
from moescope.verb import Selection

CHOICES = [" up", " in", " at", " by", " of", " on"]
TASK = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{validation: {folder}/{data}}}
  cache_dir: {folder}/cache
output_type: multiple_choice
validation_split: validation
doc_to_text: "{{{{question}}}}"
target_delimiter: ""
doc_to_choice: choices
doc_to_target: label
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("moescope.lab.train.analyse_run", lambda *given: None)
    return tmp_path


def documents(count=40):
    rows = [
        (f"{chr(97 + index % 26) * 3} {index}", CHOICES[index % 6 :] + CHOICES[: index % 6])
        for index in range(count)
    ]
    return [{"question": question, "choices": choices, "label": 0} for question, choices in rows]


def write_task(here, name="letters", data="data.jsonl"):
    (here / "data.jsonl").write_text("\n".join(json.dumps(one) for one in documents()))
    (here / "tasks").mkdir(exist_ok=True)
    (here / "tasks" / f"{name}.yaml").write_text(TASK.format(name=name, folder=here, data=data))
    return here / "tasks"


def right_answers(folder):
    """Return for every document whether its label has the largest log-likelihood, one choice per pass."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    right = []
    for one in documents():
        sums = []
        for choice in one["choices"]:
            context, whole = one["question"].encode(), (one["question"] + choice).encode()
            with torch.no_grad():
                logits = model(torch.tensor([list(whole)])).logits[0].double()
            logs = logits.log_softmax(-1)
            sums.append(sum(float(logs[at - 1, whole[at]]) for at in range(len(context), len(whole))))
        right.append(float(np.argmax(sums) == one["label"]))
    return np.array(right)


def test_accuracies_are_those_of_the_models_own_log_likelihoods(here):
    base, tasks = saved("mixtral", here / "base"), write_task(here)
    config = settings(trained="everything", learning_rate=0.03)
    run = moescope.train(config, base=base, tasks=str(tasks), out=here / "run", quiet=True)
    (row,) = run.table("task_results").to_dict("records")
    before, after = right_answers(base), right_answers(here / "run" / "model")
    assert 0 < before.mean() < 1
    assert (before != after).any()
    assert (row["task"], row["metric"], row["documents"]) == ("letters", "acc", 40)
    assert row["base_value"] == pytest.approx(before.mean())
    assert row["value"] == pytest.approx(after.mean())
    assert row["difference"] == pytest.approx(after.mean() - before.mean())
    assert row["standard_error"] == pytest.approx(after.std(ddof=1) / 40**0.5)
    assert row["difference_error"] == pytest.approx((after - before).std(ddof=1) / 40**0.5)
    (section,) = [one for one in run.verb.sections(run, Selection()) if one.anchor == "tasks"]
    heads = [head["name"] for head in section.tables[0]["columns"]]
    shown = dict(zip(heads, section.tables[0]["rows"][0], strict=True))
    assert shown.pop("task") == "letters"
    assert shown.pop("metric") == "acc"
    assert shown == pytest.approx({name: row[name] for name in shown}, rel=1e-5)
    assert any(text.startswith("letters: acc") for text in run.verb.summary(run).findings)
    # later tasks are added to the finished training
    write_task(here, "again")
    changed = (here / "run" / "model" / "model.safetensors").stat().st_mtime_ns
    more = moescope.train(config, base=base, tasks=str(tasks / "again.yaml"), out=here / "run", quiet=True)
    assert list(more.table("task_results")["task"]) == ["again"]
    assert (here / "run" / "model" / "model.safetensors").stat().st_mtime_ns == changed


def test_missing_data_are_one_line_before_the_training(here):
    base, tasks = saved("mixtral", here / "base"), write_task(here)
    text = (tasks / "letters.yaml").read_text()
    text = re.sub(r"dataset_kwargs:\n.*\n.*\n", "", text.replace("path: json", "path: nobody/nothing"))
    (tasks / "letters.yaml").write_text(text)
    with pytest.raises(BadInput, match="nobody/nothing"):
        moescope.train(settings(), base=base, tasks=str(tasks), out=here / "run", quiet=True)
    assert not (here / "run").exists()


def test_a_missing_file_of_a_task_is_one_line(here):
    with pytest.raises(BadInput, match=r"absent\.jsonl") as caught:
        load_tasks(str(write_task(here, data="absent.jsonl") / "letters.yaml"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"), [(" , ", "names no task"), ("empty", "no task's YAML file"), ("bad.yaml", "cannot be")]
)
def test_bad_tasks_are_one_line(given, said, here):
    (here / "empty").mkdir()
    (here / "bad.yaml").write_text("task: [")
    with pytest.raises(BadInput, match=said):
        load_tasks(given)


def test_without_lm_eval_or_a_base_one_line_says_so(here, monkeypatch):
    with pytest.raises(BadInput, match="--tasks is for --base"):
        moescope.train(tasks="letters", quiet=True)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(BadInput, match=r"moescope\[tasks\]"):
        load_tasks("letters")


def test_a_metric_that_is_no_mean_over_documents_has_no_paired_error():
    assert np.isnan(paired_error([1.0, 3.0], [2.0, 2.0], (2.5, 2.0)))
    assert np.isnan(paired_error([(1, 2), (1, 2)], [(1, 2), (1, 2)], (1.0, 1.0)))
    assert paired_error([0.0, 1.0, 1.0], [1.0, 1.0, 1.0], (2 / 3, 1.0)) == pytest.approx(1 / 3)


@pytest.mark.slow
def test_a_name_that_lm_eval_does_not_know_is_one_line_with_the_nearest(here):
    with pytest.raises(BadInput, match=r"near: .*hellaswag"):
        load_tasks("helaswag")


# --- studies


def lab_log_likelihood(model, context: str, text: str) -> float:
    whole = (context + text).encode()
    with torch.no_grad():
        log_p = model(torch.tensor([list(whole)])).logits_BLV[0].double().log_softmax(-1)
    return sum(float(log_p[at - 1, whole[at]]) for at in range(len(context.encode()), len(whole)))


@pytest.mark.slow
def test_a_study_scores_every_training_as_its_own_log_likelihoods_do(here):
    tasks = write_task(here)
    config = tomllib.loads(write_study(here).read_text())
    del config["arms"]["broken"]
    config["base"]["train"]["learning_rate"] = 0.1  # so that trainings answer differently
    run = moescope.study({**config, "tasks": "tasks"}, out=here / "study", quiet=True)
    found = run.table("study_tasks")
    assert list(found["documents"].unique()) == [40]
    assert found["chance"].to_numpy() == pytest.approx(1 / len(CHOICES))
    for row in found.itertuples():
        training = here / "study" / "trainings" / f"{row.arm}-seed-{row.seed}"
        model, _ = load_model(training / "checkpoints" / "step-6", "cpu")
        model.eval()
        sums = [
            [lab_log_likelihood(model, one["question"], choice) for choice in one["choices"]]
            for one in documents()
        ]
        right = [float(np.argmax(of) == one["label"]) for of, one in zip(sums, documents(), strict=True)]
        assert row.value == pytest.approx(np.mean(right))
    assert found["value"].nunique() > 1
    assert (tasks / "letters.yaml").exists()
    again = moescope.study({**config, "tasks": "tasks"}, out=here / "study", quiet=True)
    assert again.table("study_tasks").equals(found)


@pytest.mark.parametrize(("tasks", "said"), [("nothing.yaml", "nothing.yaml"), (3, "tasks must be text")])
def test_tasks_of_a_study_that_cannot_be_loaded_are_named_before_any_training(here, tasks, said):
    config = {**tomllib.loads(write_study(here).read_text()), "tasks": tasks}
    with pytest.raises(BadInput, match=said) as raised:
        moescope.study(config, out=here / "bad", quiet=True)
    assert "--tasks" not in str(raised.value)
    assert not (here / "bad").exists()


def test_a_group_of_a_folder_is_loaded_with_its_tasks(here):
    tasks = write_task(here)
    write_task(here, "again")
    group = {"group": "both", "task": ["letters", "again"], "aggregate_metric_list": [{"metric": "acc"}]}
    (tasks / "both.yaml").write_text(json.dumps(group))
    frame = score_tasks(str(tasks), trained(tiny("top2", vocabulary=258)), Bytes(), 4, "cpu", "float32")
    values = frame.set_index("task")["value"]
    assert values["both"] == pytest.approx((values["letters"] + values["again"]) / 2)
    assert frame.set_index("task")["chance"].to_numpy() == pytest.approx(1 / len(CHOICES))


def test_chance_levels_follow_the_choices_of_each_document(here):
    tasks = write_task(here)
    rows = [
        {**one, "choices": one["choices"][: 2 + at % 2], "label": 0} for at, one in enumerate(documents())
    ]
    (here / "few.jsonl").write_text("\n".join(json.dumps(one) for one in rows))
    (tasks / "few.yaml").write_text(TASK.format(name="few", folder=here, data="few.jsonl"))
    group = {"group": "both", "task": ["letters", "few"], "aggregate_metric_list": [{"metric": "acc"}]}
    (tasks / "both.yaml").write_text(json.dumps(group))
    frame = score_tasks(str(tasks), trained(tiny("top2", vocabulary=258)), Bytes(), 4, "cpu", "float32")
    levels = frame.set_index("task")["chance"]
    assert levels["few"] == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert levels["letters"] == pytest.approx(1 / 6)
    assert np.isnan(levels["both"])


def test_every_model_gets_the_same_examples_in_its_prompts(here):
    tasks = write_task(here)
    text = (tasks / "letters.yaml").read_text()
    (tasks / "letters.yaml").write_text(f"{text}num_fewshot: 2\nfewshot_split: validation\n")
    model = trained(tiny("top2", vocabulary=258, max_positions=64))
    prompts = []

    def watched(*given):
        harness = harness_model(*given)
        inner = harness.loglikelihood
        harness.loglikelihood = lambda requests, **more: (
            prompts.append([one.args for one in requests]) or inner(requests, **more)
        )
        return harness

    loaded = load_tasks(str(tasks))
    for _ in range(2):
        run_harness(watched(model, Bytes(), 4, "cpu", "float32"), loaded, quiet=True)
    assert prompts[0] == prompts[1]
    assert len({context for context, _ in prompts[0]}) > 30


def test_other_documents_make_another_study_and_generated_text_none(here):
    tasks = write_task(here)
    config = tomllib.loads(write_study(here).read_text())
    before = tasks_identity(str(tasks))
    rows = [{**one, "label": 1} for one in documents()]
    (here / "other.jsonl").write_text("\n".join(json.dumps(one) for one in rows))
    study_tasks.cache_clear()
    (tasks / "letters.yaml").write_text(TASK.format(name="letters", folder=here, data="other.jsonl"))
    assert tasks_identity(str(tasks)) != before
    text = (tasks / "letters.yaml").read_text().replace("multiple_choice", "generate_until")
    text = text.replace("doc_to_choice: choices\n", "").replace("metric: acc", "metric: exact_match")
    (tasks / "letters.yaml").write_text(text)
    study_tasks.cache_clear()
    with pytest.raises(BadInput, match="letters: it generates text"):
        moescope.study({**config, "tasks": "tasks"}, out=here / "study", quiet=True)
    assert not (here / "study").exists()
    group = {"group": "both", "task": ["letters", "absent"]}
    (tasks / "both.yaml").write_text(json.dumps(group))
    with pytest.raises(BadInput, match="cannot be loaded"):
        load_tasks(str(tasks))


def test_a_lab_model_scores_long_texts_in_windows():
    model = trained(tiny("top2", vocabulary=258)).eval()
    model.trained_length = longest = model.config.max_positions // 2  # later positions were not trained
    harness = harness_model(model, Bytes(), 4, "cpu", "float32")
    text = "the quick brown fox " * (longest // 8)
    request = SimpleNamespace(args=(text,))
    (rolling,) = harness.loglikelihood_rolling([request])
    ids, total = [Bytes().end, *text.encode()], 0.0
    for first in range(0, len(ids) - 1, longest):  # the last window is filled with context from before it
        last = min(first + longest, len(ids) - 1)
        window = ids[max(last - longest, 0) : last + 1]
        with torch.no_grad():
            log_p = model(torch.tensor([window[:-1]])).logits_BLV[0].double().log_softmax(-1)
        total += sum(
            float(log_p[at, window[at + 1]])
            for at in range(len(window) - 1 - (last - first), len(window) - 1)
        )
    assert len(ids) > 2 * longest
    assert rolling == pytest.approx(total, rel=1e-5)
    # of a long context the end is read, beside a short one in the same batch
    text = text.strip()
    pairs = [(text, " jumps"), ("a", "b")]
    found = harness.loglikelihood([SimpleNamespace(args=pair) for pair in pairs], disable_tqdm=True)
    end = text[-(longest + 1 - len(" jumps")) :]
    expected = [lab_log_likelihood(model, end, " jumps"), lab_log_likelihood(model, "a", "b")]
    assert [value for value, _ in found] == pytest.approx(expected, rel=1e-5)
