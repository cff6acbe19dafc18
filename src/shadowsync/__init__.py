"""shadowsync: trains recommendation models on the machines people really have, and nobody waits."""
