"""Read the signal strength, where there is a radio and its driver reports it."""

from pathlib import Path

WIRELESS = Path("/proc/net/wireless")


def signal_dbm(source: Path = WIRELESS) -> float | None:
    """Return the level in dBm of the first radio that has a link; None without one.

    ``source`` has two lines of headings and then one for each radio: its name, a status, and link
    quality, level and noise, each followed by a full stop where it has just been updated.
    """
    try:
        lines = source.read_text(encoding="ascii", errors="replace").splitlines()[2:]
    except OSError:
        return None
    for line in lines:
        fields = line.partition(":")[2].split()
        try:
            quality, level = (float(field.rstrip(".")) for field in fields[1:3])
        except ValueError:
            continue
        # without a measurement drivers report a quality of 0, or an impossible level in dBm
        if quality > 0 and -120.0 <= level < 0.0:
            return level
    return None
