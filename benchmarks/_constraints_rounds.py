"""A pair of whatever `pilotfish` PYTHONPATH leads to, which times its rounds; for `constraints.py`.

    python _constraints_rounds.py DRAFT TARGET TOKENS

Each line on stdin is a prompt, as JSON; it is answered by a line of JSON with the answer's tokens
and, of each round but the first, the seconds of all stages, of drafting and of the target's pass.
"""

import json
import sys
from typing import Any

import pilotfish
from pilotfish import Device, EdgeServer


def main() -> int:
    draft, target, tokens = sys.argv[1:]
    with EdgeServer(target, threads=1) as edge, Device(draft, edge.endpoint, threads=1) as device:
        print(json.dumps({"from": pilotfish.__file__}), flush=True)
        for line in sys.stdin:
            options: dict[str, Any] = {"protocol": "greedy", "window": 4, "max_tokens": int(tokens)}
            answer = device.generate(json.loads(line), **options)
            times = [each.timings for each in answer.rounds[1:]]
            rounds = [(each.total, each.draft, each.verify) for each in times]
            print(json.dumps({"tokens": answer.tokens, "rounds": rounds}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
