"""The table of the scale benchmark, and whether memory grows with the number of images."""

from tests.benchmarks.scale_measure import Row

HEAD = (
    "stage",
    "wall s",
    "CPU s",
    "RSS tree MB",
    "RSS process MB",
    "read GB",
    "written GB",
    "images/s",
    "images/CPU s",
    "",
)
MAX_GROWTH = 1.5
"""Of the largest process, when the images are ten times as many."""
CHECKED_AGAINST = "verify"
WHOLE_STORE = ("show --histograms", "diff", "export labels", "export scores")


def table(rows: list[Row], num_images: int) -> str:
    """The rows in Markdown, and how whole-store passes compare with `verify`."""
    lines = [_line(HEAD), _line(["---", *["---:"] * (len(HEAD) - 2), "---"])]
    lines += [_line(_cells(row)) for row in rows]
    if passes := _passes(rows):
        lines += ["", passes]
    return "\n".join(lines)


def _line(cells: tuple[str, ...] | list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(row: Row) -> list[str]:
    cost = row.cost
    trained = row.images is not None and cost.wall_seconds > 0 and cost.cpu_seconds > 0
    rates = [
        f"{(row.images or 0) / seconds:,.0f}" for seconds in (cost.wall_seconds, cost.cpu_seconds) if trained
    ]
    return [
        row.stage,
        f"{cost.wall_seconds:,.1f}",
        f"{cost.cpu_seconds:,.1f}",
        f"{cost.rss_tree / 1e6:,.0f}",
        f"{cost.rss_process / 1e6:,.0f}",
        f"{cost.read_bytes / 1e9:,.2f}",
        f"{cost.written_bytes / 1e9:,.2f}",
        *(rates or ["", ""]),
        ("FAILED: " if row.failed else "") + row.note.replace("|", "/"),
    ]


def _passes(rows: list[Row]) -> str:
    by_stage = {row.stage: row.cost for row in rows if not row.failed}
    base = by_stage.get(CHECKED_AGAINST)
    if base is None:
        return ""
    ratios = [
        f"{name} {cost.wall_seconds / base.wall_seconds:.1f} ({cost.cpu_seconds / base.cpu_seconds:.1f})"
        for name in WHOLE_STORE
        if (cost := by_stage.get(name)) is not None
    ]
    return f"wall (CPU) as multiples of {CHECKED_AGAINST}: {', '.join(ratios)}"


def growth(small: list[Row], large: list[Row], more_images: int) -> tuple[str, bool]:
    """(ratios of the peak memory of each stage, whether one grows with the number of images)."""
    before = {row.stage: row.cost.rss_process for row in small}
    lines, worst = (
        [_line(("stage", "RSS process MB", "ten times the images", "ratio", "bytes per image more"))],
        0.0,
    )
    lines.append(_line(["---", *["---:"] * 4]))
    for row in large:
        first, second = before.get(row.stage, 0), row.cost.rss_process
        if not first:
            continue
        ratio, each = second / first, max(0, second - first) / more_images
        worst = max(worst, ratio)
        lines.append(
            _line([row.stage, f"{first / 1e6:,.0f}", f"{second / 1e6:,.0f}", f"{ratio:.2f}", f"{each:,.0f}"])
        )
    grown = worst > MAX_GROWTH
    verdict = "grows with" if grown else "does not grow with"
    lines += ["", f"memory {verdict} the images: largest ratio {worst:.2f}, at most {MAX_GROWTH} is allowed"]
    return "\n".join(lines), grown
