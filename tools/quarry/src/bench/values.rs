//! The values that benches write and expect back: all different, and none costs a copy to make.

use super::error::BenchError;
use bytes::Bytes;
use quarry_client::{GetError, Key, Namespace, PutError, PutItem, Value, Version};

/// Values start at multiples of this in the common bytes.
const STEP: usize = 64;
/// Values differ if so many of them lie between two.
const STEPS: usize = 1 << 16;

/// Where values of one size come from.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    common: Bytes,
    size: usize,
}

impl Source {
    pub(crate) fn new(size: usize) -> Self {
        let mut state = 1_u64;
        let words = (size + STEP * STEPS).div_ceil(8);
        let mut common = Vec::with_capacity(words * 8);
        for _ in 0..words {
            // Xorshift: no two of the 64-byte windows are alike.
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            common.extend(state.to_le_bytes());
        }
        Self { common: common.into(), size }
    }

    /// Bytes of each value.
    pub(crate) const fn size(&self) -> usize {
        self.size
    }

    /// The value of number `at`.
    pub(crate) fn value(&self, at: usize) -> Bytes {
        let start = at % STEPS * STEP;
        self.common.slice(start..start + self.size)
    }

    /// Items that create the keys of these numbers.
    pub(crate) fn items(&self, prefix: &str, numbers: impl IntoIterator<Item = usize>) -> Vec<PutItem> {
        numbers.into_iter().map(|at| PutItem::create(key(prefix, at), self.value(at))).collect()
    }

    /// Checks what a get_many of these numbers answered.
    pub(crate) fn check(
        &self,
        case: &str,
        prefix: &str,
        numbers: impl IntoIterator<Item = usize>,
        got: Vec<Result<Option<Value>, GetError>>,
    ) -> Result<(), BenchError> {
        for (at, got) in numbers.into_iter().zip(got) {
            let value = self.check_one(case, prefix, at, got)?;
            if value.bytes != self.value(at) {
                return Err(BenchError::Different { case: case.to_owned(), key: key(prefix, at).to_string() });
            }
        }
        Ok(())
    }

    /// Checks that a get of this number found a value of the right length.
    pub(crate) fn check_one(
        &self,
        case: &str,
        prefix: &str,
        at: usize,
        got: Result<Option<Value>, GetError>,
    ) -> Result<Value, BenchError> {
        let name = || key(prefix, at).to_string();
        let value = got.map_err(|source| BenchError::Get { case: case.to_owned(), source })?;
        let value = value.ok_or_else(|| BenchError::Lost { case: case.to_owned(), key: name() })?;
        if value.bytes.len() == self.size {
            return Ok(value);
        }
        Err(BenchError::Different { case: case.to_owned(), key: name() })
    }

    /// Writes the values of these numbers.
    pub(crate) async fn write(
        &self,
        namespace: &Namespace,
        prefix: &str,
        numbers: std::ops::Range<usize>,
    ) -> Result<(), BenchError> {
        let batch = (32_usize << 20).div_ceil(self.size).min(4096);
        for first in numbers.clone().step_by(batch) {
            let items = self.items(prefix, first..numbers.end.min(first + batch));
            all_put("writing what is read", namespace.put_many(items).await)?;
        }
        Ok(())
    }
}

/// The key of number `at`. Keys of all prefixes of a bench share a shard or not, as any keys do.
pub(crate) fn key(prefix: &str, at: usize) -> Key {
    Key::new(format!("{prefix}/{at:07}")).expect("a short text is a key")
}

/// An error if any put of a call failed: a call that did less than it should is no measurement.
pub(crate) fn all_put(case: &str, results: Vec<Result<Version, PutError>>) -> Result<(), BenchError> {
    for result in results {
        result.map_err(|source| BenchError::Put { case: case.to_owned(), source })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn values_differ_have_their_size_and_are_made_alike_again() {
        let source = Source::new(100);
        let values: BTreeSet<Bytes> = (0..STEPS).map(|at| source.value(at)).collect();
        assert_eq!(values.len(), STEPS);
        assert!(values.iter().all(|value| value.len() == 100));
        assert_eq!(source.value(7), Source::new(100).value(7));
    }

    #[test]
    fn what_was_not_found_or_is_different_is_an_error() {
        let source = Source::new(10);
        let right = || Ok(Some(Value { bytes: source.value(0), version: Version::default() }));
        assert!(source.check("c", "p", [0], vec![right()]).is_ok());
        assert!(matches!(source.check("c", "p", [1], vec![right()]), Err(BenchError::Different { .. })));
        assert!(matches!(source.check("c", "p", [0], vec![Ok(None)]), Err(BenchError::Lost { .. })));
        let failed = Err(GetError::NotResident);
        assert!(matches!(source.check("c", "p", [0], vec![failed]), Err(BenchError::Get { .. })));
    }
}
