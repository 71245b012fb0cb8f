"""Complete a prompt with the bundled pair: a seed means the same text, whoever guesses."""

from outrider import LLM, SamplingParams

PROMPT = "def read_lines(path):\n"


def main() -> None:
    sampling = SamplingParams(temperature=0.8, seed=7, max_tokens=48)
    speculative = LLM.load("bundled", drafter="draft", strict=True).generate(PROMPT, sampling)[0]
    plain = LLM.load("bundled", drafter="none", strict=True).generate(PROMPT, sampling)[0]

    print(PROMPT + speculative.text)
    print(f"equal tokens: {speculative.token_ids == plain.token_ids}")
    print(f"tokens per round: {speculative.stats.mean_acceptance_length:.2f} instead of 1")


if __name__ == "__main__":
    main()
