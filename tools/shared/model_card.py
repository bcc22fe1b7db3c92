"""The model card of a published run: a README.md with the fields that the Hugging Face Hub reads."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bigscl.common.files import read_json_object
from bigscl.config import Config, to_yaml
from bigscl.evaluation.report_files import markdown_table, percent
from bigscl.evaluation.target import EvaluationTarget
from bigscl.models.families import family_of

NOT_STATED = "not stated"
LOCAL = ("run", "store.url", "store.endpoint", "store.region", "data.train_index", "data.val_index")
"""Settings that say nothing to others."""
PATHS = (
    "data.train",
    "data.val",
    "data.labels_file",
    "data.answers",
    "data.val_labels_file",
    "model.weights",
)
"""Settings of which only the last part of the path is published."""
MOST_NAMES = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Licences:
    """Licences that the publisher states."""

    weights: str | None
    dataset: str | None
    data: str | None


def model_card(
    target: EvaluationTarget,
    class_names: Sequence[str],
    title: str,
    licences: Licences,
    *,
    files: Sequence[str],
    repository: str | None,
) -> str:
    """Return the card: data, settings, results, use, licences. `files` are those of the network."""
    config = target.config
    assert config is not None
    settings = published_settings(config)
    results = find_results(config.run, target)
    parts = [
        f"---\n{yaml.safe_dump(_front(target, licences, title, results), sort_keys=False)}---",
        f"# {title}",
        f"A multi-label image classifier: `{target.backbone}` with {len(class_names):,} classes, trained "
        f"with bigscl ({method(config)}). Each class has its own score, the sigmoid of its logit.",
        "## Data",
        _data(config, class_names, licences),
        "## Results",
        _results(results),
        "## Use",
        _use(target, len(class_names), files, repository),
        "## Settings",
        f"```yaml\n{yaml.safe_dump(settings, sort_keys=False)}```",
        "## Licence",
        f"Weights: {licences.weights or NOT_STATED}. Training data: {licences.data or NOT_STATED}. bigscl, "
        f"which trained them: Apache-2.0.",
    ]
    return "\n\n".join(parts) + "\n"


def published_settings(config: Config) -> dict[str, Any]:
    """Return the config without local paths."""
    settings: dict[str, Any] = yaml.safe_load(to_yaml(config))
    for dotted in (*LOCAL, *PATHS):
        *sections, name = dotted.split(".")
        inner = settings
        for section in sections:
            inner = inner[section]
        if dotted in LOCAL:
            inner.pop(name, None)
        elif inner.get(name) is not None:
            inner[name] = Path(inner[name]).name
    return settings


def find_results(run: Path, target: EvaluationTarget) -> dict[str, Any]:
    """Return the figures of these weights in the run's evaluation, else in its validation, else none."""
    weights, report = Path(target.weights), run / "evaluation" / "report.json"
    # A report that is older than the weights is of earlier ones.
    fresh = report.is_file() and report.stat().st_mtime >= weights.stat().st_mtime
    found = read_json_object(report) if fresh else None
    if found is not None and found.get("model") == target.name:
        return {
            "of": f"evaluation on {found['num_images']:,} images, against {_against(found)}",
            "mAP": found["mean_ap"]["present"],
            "AP per image": found.get("image_ap"),
            "top-1": found["top1"],
            "F1 at 0.5": found["at_threshold"]["overall_f1"],
        }
    metrics = weights.parent / "metrics.json"
    if metrics.is_file() and (found := read_json_object(metrics)) is not None:
        return {
            "of": f"validation after epoch {found['epoch'] + 1}",
            "mAP": found["map"],
            "top-1": found["top1"],
        }
    return {}


def _against(report: dict[str, Any]) -> str:
    return {"labels": "all their labels", "observed": "their observed labels"}.get(
        report["labels"], "ReaL labels"
    )


def _front(
    target: EvaluationTarget, licences: Licences, title: str, results: dict[str, Any]
) -> dict[str, Any]:
    front: dict[str, Any] = {"license": licences.weights or "unknown", "pipeline_tag": "image-classification"}
    front["library_name"] = family_of(target.backbone)[0].library_name
    front["tags"] = ["multi-label", "image-classification", "spatial-consistency-loss"]
    if licences.dataset is not None:
        front["datasets"] = [licences.dataset]
    figures = {name: value for name, value in results.items() if name != "of" and value is not None}
    if figures:
        metrics = [{"type": name, "value": round(100 * value, 2)} for name, value in figures.items()]
        task, data = (
            {"type": "image-classification"},
            {"name": licences.dataset or NOT_STATED, "type": "other"},
        )
        front["model-index"] = [
            {"name": title, "results": [{"task": task, "dataset": data, "metrics": metrics}]}
        ]
    return front


def method(config: Config) -> str:
    """Return what the run minimised, and for how long."""
    objective = config.objective
    consistency = "" if objective.consistency == "none" else f" with consistency {objective.consistency}"
    return f"objective {objective.base}{consistency}, {config.schedule.epochs} epochs"


def _data(config: Config, class_names: Sequence[str], licences: Licences) -> str:
    seen = "all labels" if config.data.labels == "labels" else "partial labels"
    if config.data.labels_file is not None:
        seen += f" of {config.data.labels_file.name}"
    names = ", ".join(class_names[:MOST_NAMES])
    more = f", ... ({len(class_names):,} in classes.txt)" if len(class_names) > MOST_NAMES else ""
    shards = Path(config.data.train).name
    return f"Trained on {licences.dataset or f'shards `{shards}`'} with {seen}. Classes: {names}{more}."


def _results(results: dict[str, Any]) -> str:
    if not results:
        return "None: the run has neither been evaluated nor validated."
    figures = {name: value for name, value in results.items() if name != "of" and value is not None}
    table = markdown_table(["", *figures], [[results["of"], *map(percent, figures.values())]])
    return (
        f"{table}\n\nIn percent. mAP ranks images within each class, AP per image classes within each image."
    )


def _use(target: EvaluationTarget, num_classes: int, files: Sequence[str], repository: str | None) -> str:
    listed = ", ".join(f"`{name}`" for name in files)
    how, side = target.transform.interpolation, target.transform.size
    lines = [
        f"{listed}: the same network, whose logits agree with those of the run. `preprocessing.json` says "
        f"how images are prepared ({side} x {side}, {how}, ...), `classes.txt` names the outputs in order.",
        "",
        "```python",
    ]
    family, name = family_of(target.backbone)
    lines += family.loading_code(name, num_classes, target.args, repository)
    return "\n".join([*lines, "```"])
