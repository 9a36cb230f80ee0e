//! Deletes: a key stops having a value. Its copies rest; the key may be created again at once.
//! Tombstones of values that are written back to an origin will be kept here.

use super::{DeleteKey, DeleteRefusal, Deleted, RequestOutcome, Shard};
use crate::requests::{RequestId, RequestRefusal};
use quarry_wire::ids::NamespaceId;

impl Shard {
    pub(super) fn delete(
        &mut self,
        request: RequestId,
        namespace: NamespaceId,
        keys: &[DeleteKey],
    ) -> Result<Vec<Result<Deleted, DeleteRefusal>>, RequestRefusal> {
        match self.requests.look(self.now, self.settings.outcome_kept, request)? {
            Some(RequestOutcome::Delete(outcomes)) => return Ok(outcomes.clone()),
            Some(RequestOutcome::Grant(_) | RequestOutcome::Pin(_) | RequestOutcome::Renew(_)) => {
                return Err(RequestRefusal::Taken);
            }
            None => {}
        }
        let outcomes: Vec<_> = keys.iter().map(|key| self.delete_one(namespace, key)).collect();
        self.requests.record(request, RequestOutcome::Delete(outcomes.clone()));
        Ok(outcomes)
    }

    fn delete_one(&mut self, namespace: NamespaceId, asked: &DeleteKey) -> Result<Deleted, DeleteRefusal> {
        let shard = asked.key.shard(namespace, self.settings.shards);
        if shard != self.id {
            return Err(DeleteRefusal::WrongShard { expected: shard, found: self.id });
        }
        let version = self.version(namespace, &asked.key).ok_or(DeleteRefusal::NotFound)?;
        if let Some(expected) = asked.expected.filter(|expected| *expected != version) {
            return Err(DeleteRefusal::CompareFailed { expected, current: version });
        }
        let old = self.values.remove(&(namespace, asked.key.clone())).ok_or(DeleteRefusal::NotFound)?;
        self.retire(old);
        Ok(Deleted { version })
    }
}
