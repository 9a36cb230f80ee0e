//! Chores of the Quarry repository.
fn main() {}
