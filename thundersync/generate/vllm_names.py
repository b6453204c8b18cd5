"""Names that the coordinator and vLLM's worker processes must agree on; imports nothing."""

SHM_BACKEND = "thundersync_shm"
SETTINGS_KEY = "thundersync"
PID_FILE = "pid"
EXTENSION = "thundersync.generate.vllm_worker.WorkerExtension"
ARENA_FAULTS = "thundersync_arena_faults"
STALE_WEIGHTS = "thundersync_stale_weights"
