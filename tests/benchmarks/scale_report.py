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
GROWTH_HEAD = ("stage", "RSS process MB, a tenth", "RSS process MB", "ratio", "bytes for each image more")
# The index takes some 100 bytes for each image; one row of scores of 1000 classes takes 2000.
MAX_RATIO, MAX_BYTES_PER_IMAGE = 1.25, 200
CHECKED_AGAINST = "verify"
WHOLE_STORE = ("show --histograms", "diff", "export labels", "export scores")


def table(rows: list[Row]) -> str:
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
    trained = bool(row.images) and cost.wall_seconds > 0 and cost.cpu_seconds > 0
    times = (cost.wall_seconds, cost.cpu_seconds)
    rates = [f"{(row.images or 0) / seconds:,.0f}" for seconds in times if trained]
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
    """(peak memory of each stage at both sizes, whether one of them holds rows of all images)."""
    before = {row.stage: row.cost.rss_process for row in small}
    lines = [_line(GROWTH_HEAD), _line(["---", *["---:"] * 4])]
    grown = []
    for row in large:
        first, second = before.get(row.stage, 0), row.cost.rss_process
        if not first:
            continue
        ratio, each = second / first, (second - first) / more_images
        if ratio > MAX_RATIO and each > MAX_BYTES_PER_IMAGE:
            grown.append(row.stage)
        cells = (f"{first / 1e6:,.0f}", f"{second / 1e6:,.0f}", f"{ratio:.2f}", f"{each:,.0f}")
        lines.append(_line((row.stage, *cells)))
    verdict = (
        f"memory grows with the images in: {'; '.join(grown)}"
        if grown
        else "memory does not grow with the images"
    )
    limit = f"more than {MAX_RATIO} times and {MAX_BYTES_PER_IMAGE} bytes for each image more"
    return "\n".join([*lines, "", f"{verdict} (that is: {limit})"]), bool(grown)
