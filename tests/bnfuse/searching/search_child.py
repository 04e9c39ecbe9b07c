"""A search over a function, in a process of its own that may be killed: python search_child.py FILE SECONDS."""

import sys
import time

from bnfuse.searching.evaluation import Score, Settings
from bnfuse.searching.loop import search
from bnfuse.searching.space import Space
from bnfuse.searching.storage import open_log

SPACE = Space(tuple("abcdef"), (1.0,) * 6)
SETTINGS = Settings("bo", 12, 2, seed=3)


def main(path: str, pause: float) -> None:
    def objective(placement):
        time.sleep(pause)
        return Score((0.9 - 0.05 * (not placement[1]) - 0.003 * placement.count(0),))

    with open_log(path, SPACE, {"seed": 3}, resume=True) as log:
        print("open", flush=True)
        search(SPACE, objective, SETTINGS, history=log.history, store=log.append)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
