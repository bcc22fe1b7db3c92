"""Numbers of bytes as people read them."""


def size(num_bytes: float) -> str:
    """Bytes with a unit, in powers of 1000 as disks are sold: `5.9 MB`."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(num_bytes) < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
