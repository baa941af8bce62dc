"""The policies by name, as users give them."""

from __future__ import annotations

from devalloc.arena.policies.auto_growth_policy import AutoGrowthPolicy
from devalloc.arena.policies.bfc_policy import BfcPolicy
from devalloc.arena.policies.frugal_policy import FrugalPolicy
from devalloc.arena.policies.policy import Policy
from devalloc.arena.policies.tiny_policy import TinyPolicy
from devalloc.arena.policies.torch_policy import TorchPolicy
from devalloc.errors import InvalidArgument

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (TinyPolicy, TorchPolicy, BfcPolicy, AutoGrowthPolicy, FrugalPolicy)
}


def make_policy(policy: str | Policy, **options: object) -> Policy:
    """The policy of this name with these options; a policy object is returned as it is.

    A name with a colon in it is a settings string of PyTorch: see `TorchPolicy.from_settings`.

    Raises
    ------
    InvalidArgument
        For an unknown name or option, or an invalid value.
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str) and ":" in policy and not options:
        return TorchPolicy.from_settings(policy)
    if not isinstance(policy, str) or policy not in POLICIES:
        raise InvalidArgument(
            f"a policy is one of {', '.join(POLICIES)}, a policy object, or PyTorch's settings "
            f"such as 'max_split_size_mb:64'; not {policy!r}"
        )
    try:
        return POLICIES[policy](**options)  # type: ignore[arg-type]
    except TypeError as error:
        raise InvalidArgument(f"policy {policy!r}: {error}") from error
