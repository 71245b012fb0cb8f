"""A verifier that knows nothing of Outrider: cases on standard input, answers on standard output.

An argument names a fault to have.
"""

import json
import sys

FAULT = sys.argv[1] if len(sys.argv) > 1 else None


def inverse_cdf(weights, u):
    point, upto = u * sum(weights), 0.0
    for token, weight in enumerate(weights):
        upto += weight
        if weight > 0 and point < upto:
            return token
    return max(token for token, weight in enumerate(weights) if weight > 0)


def excess(p, q):
    left = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
    return left if sum(left) > 0 else list(p)


def token(case):
    accept, extra = case["noise"]["accept"], case["noise"]["extra"][0]
    for i, (x, q) in enumerate(zip(case["tokens"], case["draft"], strict=True)):
        p = case["target"][i]
        if not accept[i] * q[x] < p[x]:
            left = p if FAULT == "resampled from the target" else excess(p, q)
            again = accept[i] if FAULT == "noise used twice" else extra
            return {"path": list(range(1, i + 1)), "token": inverse_cdf(left, again)}
    last = case["target"][-2 if FAULT == "wrong bonus row" and case["tokens"] else -1]
    return {"path": list(range(1, len(case["tokens"]) + 1)), "token": inverse_cdf(last, extra)}


def children(case, row):
    return [j for j, parent in enumerate(case["parents"]) if parent == row]


def descend(case, choose):
    row, path = 0, []
    while True:
        x = choose(row, len(path))
        same = [j for j in children(case, row) if case["tokens"][j] == x]
        if not same:
            return {"path": path, "token": x}
        row = same[0] + 1
        path.append(row)


def law_of(case, j):
    siblings, tokens = children(case, case["parents"][j]), case["tokens"]
    kind, q = case["kinds"][j], case["draft"][j]
    if kind == "certain":
        return [float(x == tokens[j]) for x in range(len(q))]
    gone = set()
    if kind == "without" and FAULT != "siblings left in":
        gone = {tokens[s] for s in siblings if s < j}
    if kind == "tail":
        gone = {tokens[s] for s in siblings if case["kinds"][s] == "certain"}
    left = [0.0 if x in gone else mass for x, mass in enumerate(q)]
    return [mass / sum(left) for mass in left] if sum(left) > 0 else left


def recursive(case):
    row, path, noise = 0, [], case["noise"]
    while True:
        left = case["target"][row]
        for j in children(case, row):
            q, x = law_of(case, j), case["tokens"][j]
            if noise["accept"][j] * q[x] < left[x]:
                row = j + 1
                path.append(row)
                break
            if FAULT != "target not updated":
                rest = excess(left, q)
                left = [mass / sum(rest) for mass in rest]
        else:
            return {"path": path, "token": inverse_cdf(left, noise["extra"][0])}


def greedy(case):
    return descend(case, lambda row, _: case["target"][row].index(max(case["target"][row])))


def match(case):
    return descend(
        case, lambda row, _: inverse_cdf(case["target"][row], case["noise"]["extra"][row])
    )


RULES = {
    "token": token,
    "greedy": greedy,
    "match": match,
    "recursive": recursive,
    "hybrid": recursive,
}

for line in sys.stdin:
    one = json.loads(line)
    rule = RULES.get(one["rule"])
    print(json.dumps(None if rule is None else rule(one)))
