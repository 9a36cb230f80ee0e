//! Who answered while the leader of a group was looked for, and who did not: what a caller is told who waited in vain.
//!
//! Only says what was met; whether to ask again is `retry.rs`'s to decide.

use crate::retry::Fault;
use std::collections::BTreeSet;

/// The meta nodes that were asked for one group, by what they did last.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Reached {
    answered: BTreeSet<String>,
    silent: BTreeSet<String>,
}

impl Reached {
    /// An attempt at `address` failed.
    pub(crate) fn note(&mut self, address: &str, fault: &Fault) {
        let (is, was) = match fault {
            Fault::Refused(_) | Fault::Distrust(_) => (&mut self.answered, &mut self.silent),
            Fault::Transport(_) | Fault::TimedOut => (&mut self.silent, &mut self.answered),
        };
        was.remove(address);
        is.insert(address.to_owned());
    }

    /// What that means for `group` of a cluster with these meta nodes; nothing if all answered who were asked. Others may be asked that are none
    /// any more.
    pub(crate) fn told(&self, group: u32, metas: &[String]) -> Option<String> {
        if self.silent.is_empty() {
            return None;
        }
        let names = |of: &BTreeSet<String>| {
            if of.is_empty() { "nobody".to_owned() } else { of.iter().cloned().collect::<Vec<_>>().join(", ") }
        };
        let who = format!("reached {}, not reached {}", names(&self.answered), names(&self.silent));
        let silent = metas.iter().filter(|meta| self.silent.contains(*meta)).count();
        let metas = metas.len();
        Some(if 2 * (metas - silent) > metas {
            format!("meta nodes for group {group}: {who}")
        } else {
            format!("no majority of the {metas} meta nodes answers for group {group}: {who}")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quarry_proto::{refusal::Refusal, v1::NotLeader};

    fn no_leader() -> Fault {
        Fault::Refused(Box::new(Refusal::NotLeader(NotLeader::default())))
    }

    #[test]
    fn without_a_majority_it_is_said_who_answered_and_who_did_not() {
        let mut reached = Reached::default();
        let metas = ["h:1", "h:2", "h:3"].map(str::to_owned);
        reached.note("h:1", &no_leader());
        assert_eq!(reached.told(1, &metas), None);
        reached.note("gone:1", &Fault::TimedOut);
        reached.note("gone:2", &Fault::TimedOut);
        let told = reached.told(1, &metas).unwrap();
        assert!(told.starts_with("meta nodes for group 1"), "those are members no more: {told}");
        reached.silent.clear();
        reached.note("h:2", &Fault::TimedOut);
        assert_eq!(reached.told(1, &metas).unwrap(), "meta nodes for group 1: reached h:1, not reached h:2");
        reached.note("h:3", &Fault::Transport("refused".to_owned()));
        let told = "no majority of the 3 meta nodes answers for group 1: reached h:1, not reached h:2, h:3";
        assert_eq!(reached.told(1, &metas).unwrap(), told);
        reached.note("h:1", &Fault::TimedOut);
        assert!(reached.told(1, &metas).unwrap().contains("reached nobody, not reached h:1, h:2, h:3"));
    }

    #[test]
    fn the_last_answer_of_each_counts() {
        let mut reached = Reached::default();
        reached.note("h:1", &Fault::TimedOut);
        reached.note("h:1", &no_leader());
        assert_eq!(reached.told(0, &["h:1".to_owned()]), None);
    }
}
