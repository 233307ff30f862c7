"""Tables of `ridgeplan study dapq` and `study retrieval`, from their files in validate/results."""

from __future__ import annotations

from typing import Any

from readme_tables import result, table

CONTENTS = {"other content, same position": ("other", "same"), "same content, other position": ("same", "other"),
            "both other": ("other", "other")}  # fmt: skip


def study_positions(*names: str) -> str:
    """Similarity of queries to those of the coming tokens after RoPE: by content and position, then by offset."""
    means = [_means(name) for name in names]
    contents = {content: ("similarity", *key, "after") for content, key in CONTENTS.items()}
    offsets = {f"same content, offset of {key[1]}": key for key in means[0] if key[0] == "offset" and key[1]}
    rows = (
        (label, *(f"{study_means[key]:.3f}" for study_means in means)) for label, key in (contents | offsets).items()
    )
    return table(("queries", *(result(name)["model"] for name in names)), rows)


def study_rounds(*names: str) -> str:
    """Acceptance of drafts in rounds as they run, and tokens a round: a column for each study, a line a policy."""
    studies = [result(name) for name in names]
    cells = {
        (row["policy"], column): f"{row['mean']:.3f}, {row['tokens_per_round']:.2f} ({row['rounds']})"
        for column, study in enumerate(studies)
        for row in study["rows"]
    }
    columns = (f"{study['rows'][0]['context']} tokens, {study['rows'][0]['ratio']:.0%}" for study in studies)
    policies = dict.fromkeys(policy for policy, _ in cells)
    lines = ((policy, *(cells.get((policy, column), "") for column in range(len(studies)))) for policy in policies)
    return table(("acceptance, tokens a round (rounds)", *columns), lines)


def study_recalls(name: str) -> str:
    """Recall of the prompt tokens that are read most: a column for each budget / window."""
    means = _means(name)
    cases = sorted({key[2:] for key in means if key[0] == "recall"}, key=lambda case: case[::-1])
    methods = dict.fromkeys(key[1] for key in means if key[0] == "recall")
    rows = ((method, *(f"{means['recall', method, *case]:.3f}" for case in cases)) for method in methods)
    return table(("recall", *(f"{budget}/{window}" for window, budget in cases)), rows)


def study_pseudo_queries(name: str) -> str:
    """Recall of every choice of pseudo queries: a column for each budget."""
    means = {key[1:]: mean for key, mean in _means(name).items() if key[0] == "choice"}
    budgets = dict.fromkeys(budget for *_, budget in means)
    choices = dict.fromkeys(key[:-1] for key in means)
    rows = ((*choice, *(f"{means[*choice, budget]:.3f}" for budget in budgets)) for choice in choices)
    return table(("", "recall", *map(str, budgets)), rows)


def study_axes(name: str) -> str:
    """Perplexity by the axes along which keys and values share scales: a line for each number of bits and keys."""
    rows = result(name)["rows"]
    values = {(row["bits"], row["keys"], row["values"]): f"{row['perplexity']:.3f}" for row in rows}
    plain, *_ = values.values()
    lines = [(f"{bits} bits", f"by {keys}", *(values[bits, keys, axis] for axis in ("token", "channel")))
             for bits in (8, 4) for keys in ("token", "channel")]  # fmt: skip
    return table(("", "keys", "values by token", "values by channel"), [("16 bits", "", plain, plain), *lines])


def study_claims(*names: str) -> str:
    """What the paper finds, and whether it holds for each model."""
    studies = [result(name) for name in names]
    rows = (
        (claims[0]["text"], *(f"{'yes' if study['holds'] else 'no'}, {study['detail']}" for study in claims))
        for claims in zip(*(study["claims"] for study in studies), strict=True)
    )
    return table(("finding", *(study["model"] for study in studies)), rows)


def study_choices(name: str) -> str:
    """What each selection finds of the model's own choice, and how much of it the step before had, at each budget."""
    rows = result(name)["rows"]
    budgets = dict.fromkeys(row["budget"] for row in rows)
    rows_by_method = {(row["method"], row["budget"]): row for row in rows}
    columns = {"hit": "hit", "mass": "mass of the attention", "overlap": "overlap of adjacent steps"}

    def figures(method: str, column: str) -> str:
        return " / ".join(f"{rows_by_method[method, budget][column]:.3f}" for budget in budgets)

    methods = dict.fromkeys(row["method"] for row in rows)
    return table(
        (f"read: {' / '.join(map(str, budgets))} tokens", *columns.values()),
        ((method, *(figures(method, column) for column in columns)) for method in methods),
    )


def study_losses(name: str) -> str:
    """What heads of each loss find and how many drafts they get accepted, at each budget, beside StreamingLLM."""
    sections = result(name)
    losses = [section.removeprefix("training ") for section in sections if section.startswith("training ")]
    first = losses[0]
    budgets = list(dict.fromkeys(row["budget"] for row in sections[f"hits {first}"]))

    def cell(loss: str, section: str, key: str, method: str, column: str) -> str:
        means = {row["budget"]: row[column] for row in sections[f"{section} {loss}"] if row[key] == method}
        return " / ".join(f"{means[budget]:.3f}" for budget in budgets) if means else ""

    def line(label: str, loss: str, method: str) -> tuple[str, ...]:
        hits = (cell(loss, "hits", "method", method, column) for column in ("hit", "mass", "overlap"))
        return label, *hits, cell(loss, "acceptance", "policy", method, "mean")

    steps = {loss: sections[f"training {loss}"]["steps_done"] for loss in losses}
    methods = {"a set for each KV head": "retrieval-head", "one set for all": "retrieval-batch"}
    lines = [line(f"loss of {loss}, {steps[loss]} steps, {label}", loss, method)
             for loss in losses for label, method in methods.items()]  # fmt: skip
    columns = ("hit", "mass of the attention", "overlap of adjacent steps", "acceptance")
    sizes = " / ".join(map(str, budgets))
    return table((f"read: {sizes} tokens", *columns), [*lines, line("StreamingLLM", first, "streamingllm")])


def _means(name: str) -> dict[tuple[Any, ...], float]:
    return {tuple(row["figure"]): row["mean"] for row in result(name)["figures"]}
