"""Configuration of SMP's mixture of experts."""

from dataclasses import dataclass


@dataclass
class MoEConfig:
    """See the contract, section 2.2."""

    smp_moe: bool = True
    random_seed: int = 12345
    moe_load_balancing: str = "sinkhorn"
    global_token_shuffle: bool = False
    moe_all_to_all_dispatcher: bool = True
    moe_aux_loss_coeff: float = 0.001
    moe_z_loss_coeff: float = 0.001
    use_cpu_initialization: bool = False

    def __post_init__(self) -> None:
        if self.moe_load_balancing not in ("aux_loss", "sinkhorn", "balanced", "none"):
            raise ValueError(f"moe_load_balancing {self.moe_load_balancing!r}")
