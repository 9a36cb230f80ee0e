//! The pure state machines of Quarry's control plane: directory and shard.
