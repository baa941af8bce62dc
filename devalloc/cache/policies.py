"""The policies by name."""

from __future__ import annotations

from devalloc.cache.auto_growth_policy import AutoGrowthPolicy
from devalloc.cache.bfc_policy import BfcPolicy
from devalloc.cache.frugal_policy import FrugalPolicy
from devalloc.cache.policy import Policy, TinyPolicy
from devalloc.cache.torch_policy import TorchPolicy
from devalloc.errors import InvalidArgument

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (TinyPolicy, TorchPolicy, BfcPolicy, AutoGrowthPolicy, FrugalPolicy)
}


def make_policy(policy: str | Policy, **options: object) -> Policy:
    """The policy of this name with these options; a policy object is returned as it is.

    Raises
    ------
    InvalidArgument
        For an unknown name or option, or an invalid value.
    """
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str) or policy not in POLICIES:
        raise InvalidArgument(
            f"a policy is one of {', '.join(POLICIES)}, or a policy object, not {policy!r}"
        )
    try:
        return POLICIES[policy](**options)
    except TypeError as error:
        raise InvalidArgument(f"policy {policy!r}: {error}") from error
