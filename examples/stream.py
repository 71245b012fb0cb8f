"""Stream a text as it is made, and count how many of its tokens were guessed."""

from outrider import LLM, SamplingParams

PROMPT = "class Queue:\n    def __init__(self"


def main() -> None:
    llm = LLM.load("bundled")
    counts = {"draft": 0, "correction": 0, "bonus": 0}
    print(PROMPT, end="")
    for delta in llm.stream(PROMPT, SamplingParams(temperature=0, max_tokens=48)):
        print(delta.text, end="", flush=True)
        for source in delta.sources:
            counts[source] += 1
    print(f"\n{counts['draft']} tokens were guessed, {counts['correction']} were corrections")


if __name__ == "__main__":
    main()
