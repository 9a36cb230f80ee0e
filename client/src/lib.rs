//! The Quarry client: put and get values by one-sided RMA.
