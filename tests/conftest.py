"""What every test gets: one thread, no network, no variables of the machine that would change a result."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
for name in list(os.environ):
    if name.startswith(("SM_", "SLURM_", "OMPI_", "PMI_", "PALS_")) or name in {
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT",
    }:
        del os.environ[name]
