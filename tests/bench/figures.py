"""Files and means for the scripts that make the tables and pictures of the documents."""
import json
import math
import pathlib

RESULTS = pathlib.Path(__file__).resolve().parent / "results"


def load(name):
    """The committed results of that name."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def geometric_mean(values):
    return math.exp(sum(map(math.log, values)) / len(values))
