"""Size of the package: its code lines by what they came for, since an older commit.

    python benchmarks/house.py --since eef88dc --renames 83ed324 a10aaea 53bda49

Code lines are lines with a token that is no comment and no docstring. A module is of a
feature that came after ``--since`` if ``FEATURES`` names it. Of all other modules
``git blame -w -M -C`` says which lines stood at that commit, and which commit wrote
those that did not; ``--renames`` are commits that gave nothing but other names. A
commit that also changed a module of a feature is counted as work on that feature: an
estimate, since it may have done other work as well. ``full``: the modules that all of
a row would fill to the last of ``MOST`` lines, comments and docstrings counted.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import tokenize
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

# Feature: the modules that came for it and serve nothing else.
FEATURES = {
    "one compilation for ranks, layers, sizes and starts": (
        *("graph_bodies", "outline_layers", "size_nodes"),
        *("compile_once", "known_programs", "program_identity", "call_sizes"),
        *("call_variants", "compile_variants", "open_sizes", "fewer_layers"),
        *("own_shard", "cpp_kernels", "status_line", "symbols", "batch_growth"),
        *("growth_powers", "cache_files", "mailboxes", "shared_results"),
    ),
    "uneven dims, parts of an axis, halos, rows that move": (
        *("uneven_batch", "local_slices", "local_moves", "moved_rows", "halos"),
        *("local_order", "lower_uneven", "normalize_shifts", "cut_joins"),
        *("place_functions", "place_rules", "axis_parts", "shard_sizes"),
        *("row_moves", "shift_messages", "moved_dims", "window_dims", "order"),
        *("statistics", "divide_summands", "rank_sizes", "near_rows", "padding"),
        "row_places",
    ),
    "long sequences, experts, manual regions": (
        *("passes/attention/*", "passes/experts/*", "passes/regions/*"),
        *("attention_form", "balance", "overlap_attention", "ring_attention"),
        *("region_specs", "shard_map", "body_rules", "body_ties", "body_seeds"),
        *("softmax_pairs", "attention_heads", "nn_attention", "local_flex"),
        "visible_pairs",
    ),
    "microbatches and stages": (
        *("passes/stages/*", "stage_times", "pipeline_state", "stage_steps"),
        *("choose_stages", "cut_in_time", "cut_stages", "pipeline_axis"),
        *("pipeline_schedule", "rest_over_stages", "batch_parts", "price_stages"),
        *("stage_bytes", "stage_chain", "simulate_pipeline", "pipelining"),
    ),
}
# Lines of a module.
MOST = 400
_SPACE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(text: str) -> set[int]:
    """Numbers of the lines with code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _SPACE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
            doc = node.body[0]
            lines.difference_update(range(doc.lineno, (doc.end_lineno or 0) + 1))
    return lines


def feature_of(path: str) -> str | None:
    """The later feature that a module is of, by its path."""
    for feature, modules in FEATURES.items():
        for module in modules:
            if fnmatch(path, f"*/{module}.py") or fnmatch(path, f"*/{module}"):
                return feature
    return None


def _git(*words: str) -> str:
    run = subprocess.run(["git", *words], capture_output=True, text=True, check=True)
    return run.stdout


def features_of_commits(since: str) -> dict[str, str]:
    """The feature whose modules a commit changed most; none if it changed none."""
    features = {}
    for entry in _git("log", "--format=%x00%H", "--name-only", f"{since}..").split(
        "\0"
    ):
        commit, *paths = entry.split() or [""]
        ours = [path for path in paths if path.startswith("fxpar/")]
        counts = Counter(feature for feature in map(feature_of, ours) if feature)
        if counts:
            features[commit] = counts.most_common(1)[0][0]
    return features


def blamed(path: str, since: str, renames: Sequence[str]) -> dict[int, str | None]:
    """The commit that wrote each line of a file; None if it stood at ``since``.
    ``renames``: commits that wrote nothing but other names."""
    ignored = [word for commit in renames for word in ("--ignore-rev", commit)]
    options = ("-w", "-M", "-C", "-s", "-l", *ignored)
    text = _git("blame", *options, f"{since}..HEAD", "--", path)
    commits: dict[int, str | None] = {}
    for line in text.splitlines():
        match = re.match(r"[*?]*(\^?)([0-9a-f]{39,40}) .*?(\d+)\) ?", line)
        assert match is not None, line
        commits[int(match[3])] = None if match[1] else match[2]
    return commits


def table(since: str, renames: Sequence[str]) -> list[tuple[str, int, int, int]]:
    """Rows of what lines came for, modules, those all would fill, code lines."""
    features = features_of_commits(since)
    modules: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    # With comments and docstrings.
    text_lines: Counter[str | None] = Counter()
    other = 0
    for path in _git("ls-files", "fxpar/**.py", "fxpar/*.py").split():
        text = Path(path).read_text()
        code, feature = code_lines(text), feature_of(path)
        text_lines[feature] += text.count("\n")
        if feature is not None:
            modules[feature] += 1
            lines[feature] += len(code)
            continue
        other += 1
        commits = blamed(path, since, renames)
        for number in code:
            commit = commits[number]
            if commit is None:
                lines["stood"] += 1
            elif commit in features:
                lines["with " + features[commit]] += 1
            else:
                lines["since"] += 1
    full = {feature: -(-n // MOST) for feature, n in text_lines.items()}
    rows = [(f"modules of {f}", modules[f], full[f], lines[f]) for f in FEATURES]
    others = sum(lines.values()) - sum(row[3] for row in rows)
    rows.append(("all other modules", other, full[None], others))
    rows.append(("- lines that stood then", 0, 0, lines["stood"]))
    rows += [(f"- written with {f}", 0, 0, lines["with " + f]) for f in FEATURES]
    rows.append(("- written since, with none of these", 0, 0, lines["since"]))
    old = lines["stood"] + lines["since"]
    rows.append(("what stood then or is of none", 0, 0, old))
    return rows


def then(since: str) -> tuple[int, int]:
    """Modules and code lines of the package at a commit."""
    paths = _git("ls-tree", "-r", "--name-only", since, "fxpar").split()
    paths = [path for path in paths if path.endswith(".py")]
    return len(paths), sum(len(code_lines(_git("show", f"{since}:{p}"))) for p in paths)


def main() -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--since", default="eef88dc")
    parser.add_argument("--renames", nargs="*", default=())
    args = parser.parse_args()
    since = args.since
    rows = table(since, args.renames)
    total = len(FEATURES) + 1
    _, command, *text = __doc__.strip().split("\n\n")
    print(f"# Size of the package\n\n```\n{command.strip()}\n```\n\n{text[0]}\n")
    print("| what | modules | full | code lines |\n| --- | ---: | ---: | ---: |")
    print("| the package then | {} | | {:,} |".format(*then(since)))
    for what, modules, full, lines in rows:
        print(f"| {what} | {modules or ''} | {full or ''} | {lines:,} |")
    files, full, code = (sum(row[i] for row in rows[:total]) for i in (1, 2, 3))
    print(f"| the package now | {files} | {full} | {code:,} |")


if __name__ == "__main__":
    main()
