//! The data node: lends registered memory and judges who may write it.
