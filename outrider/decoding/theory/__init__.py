"""What speculation should give, in closed form: acceptance, expected tokens, best depth.

Arithmetic is the caller's: Fractions give exact answers, floats quick ones; only roots and
integrals are always floats. p is the target's law, q the draft's, a law a sequence of
probabilities, a model a function from a prefix to a law.
"""

from outrider.decoding.theory.chains import (
    accepted_ceiling,
    block_expected_accepted,
    expected_rejections,
    expected_tokens,
    expected_tokens_by_rank,
    expected_tokens_iid,
    expected_tokens_marginal,
    expected_tokens_tree,
    match_expected_accepted,
    token_expected_accepted,
)
from outrider.decoding.theory.cost import (
    BestDepth,
    operations_factor,
    optimal_depth,
    optimal_depth_measured,
    speedup,
)
from outrider.decoding.theory.multi_draft import (
    BestOf,
    best_of_acceptance,
    best_of_guard,
    best_of_law,
    hybrid_acceptance,
    kseq_acceptance,
    kseq_beta,
    kseq_rho,
    recursive_acceptance,
    recursive_acceptance_iid,
    recursive_acceptance_without,
    top_acceptance,
)
from outrider.decoding.theory.one_draft import (
    LawRow,
    Model,
    Number,
    acceptance,
    excess,
    gumbel_acceptance,
    match_acceptance,
    minhash_acceptance,
    total_variation,
)
from outrider.decoding.theory.optimum import (
    SetLaw,
    optimal_acceptance,
    optimal_acceptance_iid,
    optimal_acceptance_without,
    set_law_without,
)
from outrider.decoding.theory.races import (
    gumbel_rank_rates,
    gumbel_top_acceptance,
    optimal_acceptance_without_quadrature,
)
from outrider.decoding.theory.surrogates import (
    lenience_acceptance,
    lenience_law,
    mixture_acceptance,
    mixture_law,
    sequence_bound,
)

__all__ = [
    "BestDepth",
    "BestOf",
    "LawRow",
    "Model",
    "Number",
    "SetLaw",
    "acceptance",
    "accepted_ceiling",
    "best_of_acceptance",
    "best_of_guard",
    "best_of_law",
    "block_expected_accepted",
    "excess",
    "expected_rejections",
    "expected_tokens",
    "expected_tokens_by_rank",
    "expected_tokens_iid",
    "expected_tokens_marginal",
    "expected_tokens_tree",
    "gumbel_acceptance",
    "gumbel_rank_rates",
    "gumbel_top_acceptance",
    "hybrid_acceptance",
    "kseq_acceptance",
    "kseq_beta",
    "kseq_rho",
    "lenience_acceptance",
    "lenience_law",
    "match_acceptance",
    "match_expected_accepted",
    "minhash_acceptance",
    "mixture_acceptance",
    "mixture_law",
    "operations_factor",
    "optimal_acceptance",
    "optimal_acceptance_iid",
    "optimal_acceptance_without",
    "optimal_acceptance_without_quadrature",
    "optimal_depth",
    "optimal_depth_measured",
    "recursive_acceptance",
    "recursive_acceptance_iid",
    "recursive_acceptance_without",
    "sequence_bound",
    "set_law_without",
    "speedup",
    "token_expected_accepted",
    "top_acceptance",
    "total_variation",
]
