"""A slow-target pair, by replay: real rounds with other computing times, over links as stated."""

from copy import deepcopy

from _cases import Case
from _common import PROMPTS, Rows
from links import RATES_MBPS, RTTS_MS

from device_runtime.choice import Evidence
from device_runtime.choice.predictive import Predictive
from device_runtime.plan import Plan, plan
from device_runtime.record import Round
from field.replay import replayed
from pilotfish import Device
from speculation.latency import Link
from wire.link.state import LinkState, Reading
from wire.protocols import STREAM

DRAFT_S, VERIFY_S = 0.010, 0.100  # T_verify = 10 · T_draft
WINDOWS = (1, 2, 4, 6, 8, 12, 16)
PROTOCOLS = {0.0: ("greedy",), 1.0: ("coupled", "tslt", "tree", "dssd", "dsd")}


def slow_target(device: Device, *, prompts: int, tokens: int) -> Rows:
    """A row for each link, temperature, and whether `stream` is to choose from."""
    rows: Rows = []
    for temperature, protocols in PROTOCOLS.items():
        plans = [
            plan(protocol=protocol, window=window, temperature=temperature, seed=0)
            for protocol in protocols
            for window in WINDOWS
        ]
        plans.append(plan(protocol=STREAM, temperature=temperature, seed=0, max_tokens=tokens))
        recorded = [_record(device, one, prompts, tokens) for one in plans]
        for rtt in RTTS_MS:
            for rate in RATES_MBPS:
                link = Link(rtt_s=rtt * 1e-3, up_bps=rate * 1e6, down_bps=rate * 1e6)
                costs = [replayed(rounds, link, DRAFT_S, VERIFY_S) * 1e3 for rounds in recorded]
                for with_stream in (True, False):
                    allowed = [at for at, one in enumerate(plans) if with_stream or one.exchange]
                    row = _choose(device, plans, recorded, costs, allowed, link)
                    about = {"link": f"{rtt} ms, {rate} Mbit/s", "temperature": temperature}
                    rows.append({"part": "modelled", **about, "stream_too": with_stream, **row})
    return rows


def _record(device: Device, wanted: Plan, prompts: int, tokens: int) -> list[Round]:
    """Rounds of a plan, with the computing times of a slow target in them."""
    case = Case(
        wanted.protocol,
        {"protocol": wanted.protocol, "temperature": wanted.law.sampling.temperature},
    )
    if wanted.exchange is not None:
        case.options["window"] = len(wanted.expansion)
    for seed in range(prompts):
        case.run(device, PROMPTS[seed], seed, tokens)
    rounds = deepcopy([round_ for answer in case.generations for round_ in answer.rounds])
    for round_ in rounds:
        round_.timings.draft, round_.timings.verify = DRAFT_S * round_.window, VERIFY_S
        round_.timings.queue = 0.0
    return rounds


def _choose(
    device: Device,
    plans: list[Plan],
    recorded: list[list[Round]],
    costs: list[float],
    allowed: list[int],
    link: Link,
) -> dict[str, object]:
    """What "auto" picks of the allowed plans: at first, and when it has seen what it picked."""
    assert device.welcome is not None
    widths = (1, 2, 4, 8, 16, 32)
    evidence = Evidence(
        dict.fromkeys(widths, DRAFT_S), dict.fromkeys(widths, VERIFY_S), device.welcome.vocab_size
    )
    state = LinkState(
        rtt=Reading(value=link.rtt_s, age_s=0.0, samples=5),
        up=Reading(value=link.up_bps, age_s=0.0, samples=5),
        down=Reading(value=link.down_bps, age_s=0.0, samples=5),
    )
    policy = Predictive()
    picked = []
    for _ in range(6):
        chosen, _ = policy.choose([plans[at] for at in allowed], state, evidence)
        at = next(at for at in allowed if plans[at] is chosen)
        picked.append(at)
        evidence.add(chosen, recorded[at])
    best = min(allowed, key=lambda at: costs[at])
    drafting = min(cost for one, cost in zip(plans, costs, strict=True) if one.exchange)
    names = [f"{one.protocol} {len(one.expansion) or ''}".strip() for one in plans]
    return {
        "auto_ms": costs[picked[-1]],
        "chose": ", ".join(dict.fromkeys(names[at] for at in picked)),
        "best_ms": costs[best],
        "best": names[best],
        "behind": costs[picked[-1]] / costs[best] - 1.0,
        "behind_at_first": costs[picked[0]] / costs[best] - 1.0,
        "stream_ms": costs[-1],
        "pays": drafting < costs[-1],
        "fixed_ms": dict(zip(names, costs, strict=True)),
    }
