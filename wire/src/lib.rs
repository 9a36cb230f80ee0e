//! What both sides of every Quarry connection must agree on: ids, units, signed statements, frames, limits.
