//! What is found in a folder whose process was killed: a copy of the files, made while the store is open, holds everything that was
//! acknowledged and nothing that was cut off.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use bytes::Bytes;
use openraft::storage::{IOFlushed, RaftLogStorage};
use openraft::type_config::TypeConfigExt;
use openraft::{EntryPayload, RaftLogReader};
use std::sync::Arc;

use super::log::GroupLog;
use super::{Store, keys};
use crate::config::HostConfig;
use crate::ids::{GroupId, RaftNodeId};
use crate::types::{Command, Entry, LogId, Types, Vote, log_id};

const GROUPS: [GroupId; 2] = [GroupId(1), GroupId(2)];

/// What a group's log must hold.
#[derive(Default)]
struct Model {
    entries: BTreeMap<u64, Entry>,
    purged: Option<LogId>,
    vote: Option<Vote>,
    term: u64,
}

impl Model {
    fn last(&self) -> Option<LogId> {
        self.entries.last_key_value().map(|(_, entry)| entry.log_id).or(self.purged)
    }
    fn next(&self) -> u64 {
        self.last().map_or(1, |last| last.index() + 1)
    }
}

/// Numbers that look drawn by lot, the same in each run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

async fn append(log: &mut GroupLog, model: &mut Model, count: u64, bytes: u64) {
    let entries: Vec<Entry> = (model.next()..model.next() + count)
        .map(|index| {
            let command = vec![u8::try_from(index % 251).unwrap(); usize::try_from(bytes).unwrap()];
            Entry { log_id: log_id(model.term, index), payload: EntryPayload::Normal(Command(Bytes::from(command))) }
        })
        .collect();
    let (done, answer) = Types::oneshot();
    log.append(entries.clone(), IOFlushed::signal(done)).await.unwrap();
    answer.await.unwrap().unwrap();
    model.entries.extend(entries.into_iter().map(|entry| (entry.log_id.index(), entry)));
}

/// One thing that consensus may do to a log.
async fn step(log: &mut GroupLog, model: &mut Model, dice: &mut Dice) {
    match dice.below(20) {
        0 => {
            model.term += 1;
            let vote = Vote::new(model.term, dice.below(3));
            log.save_vote(&vote).await.unwrap();
            model.vote = Some(vote);
        }
        1 if model.entries.len() > 2 => {
            let at = model.next() - 1 - dice.below(model.entries.len() as u64 - 1);
            let before = model.entries.get(&(at - 1)).map(|entry| entry.log_id).or(model.purged);
            log.truncate_after(before).await.unwrap();
            model.entries.split_off(&at);
            model.term += 1;
        }
        2 if model.entries.len() > 2 => {
            let first = *model.entries.keys().next().unwrap();
            let upto = model.entries[&(first + dice.below(model.entries.len() as u64))].log_id;
            log.purge(upto).await.unwrap();
            model.entries = model.entries.split_off(&(upto.index() + 1));
            model.purged = Some(upto);
        }
        // A snapshot of another node: the log goes on behind a gap.
        3 if dice.below(4) == 0 => {
            let upto = log_id(model.term, model.next() + dice.below(500));
            log.purge(upto).await.unwrap();
            model.entries.clear();
            model.purged = Some(upto);
        }
        4 => log.save_committed(model.last()).await.unwrap(),
        _ => {
            let (count, bytes) = (1 + dice.below(4), dice.below(32 << 10));
            append(log, model, count, bytes).await;
        }
    }
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for item in fs::read_dir(from).unwrap().map(Result::unwrap) {
        let place = to.join(item.file_name());
        if item.file_type().unwrap().is_dir() {
            copy(&item.path(), &place);
        } else {
            fs::copy(item.path(), place).unwrap();
        }
    }
}

async fn holds(config: &HostConfig, models: &[Model]) {
    let store = Arc::new(Store::open(config).unwrap());
    for (group, model) in GROUPS.into_iter().zip(models) {
        let mut log = GroupLog::open(&store, group).unwrap();
        let state = log.get_log_state().await.unwrap();
        assert_eq!((state.last_log_id, state.last_purged_log_id), (model.last(), model.purged), "{group}");
        assert_eq!(log.read_vote().await.unwrap(), model.vote, "{group}");
        let found = log.try_get_log_entries(0..u64::MAX).await.unwrap();
        let expected: Vec<Entry> = model.entries.values().cloned().collect();
        assert!(found == expected, "group {group} has {} entries, {} are expected", found.len(), expected.len());
        assert!(log.read_committed().await.unwrap() <= model.last());
    }
    store.close();
}

#[tokio::test]
async fn a_folder_copied_from_under_a_process_holds_all_that_was_acknowledged() {
    let dir = tempfile::tempdir().unwrap();
    let config =
        |name: &str| HostConfig { log_cache_bytes: 8 << 20, ..HostConfig::new(RaftNodeId(1), dir.path().join(name)) };
    let mut dice = Dice(7);
    let mut models = GROUPS.map(|_| Model::default());
    for life in 0..12 {
        // Every life goes on in what the one before it left behind.
        let (name, left) = (format!("life-{life}"), format!("life-{}", life + 1));
        let store = Arc::new(Store::open(&config(&name)).unwrap());
        let mut logs = GROUPS.map(|group| GroupLog::open(&store, group).unwrap());
        for _ in 0..dice.below(150) {
            let turn = usize::try_from(dice.below(2)).unwrap();
            step(&mut logs[turn], &mut models[turn], &mut dice).await;
        }
        copy(&dir.path().join(&name), &dir.path().join(&left));
        store.close();
        // Looked at in a copy of its own, so that looking changes nothing.
        let seen = format!("seen-{life}");
        copy(&dir.path().join(&left), &dir.path().join(&seen));
        holds(&config(&seen), &models).await;
    }
}

#[tokio::test]
async fn an_entry_of_which_only_some_parts_were_written_is_forgotten() {
    let dir = tempfile::tempdir().unwrap();
    let config = HostConfig { log_cache_bytes: 8 << 20, ..HostConfig::new(RaftNodeId(1), dir.path().join("node")) };
    let mut models = GROUPS.map(|_| Model::default());
    {
        let store = Arc::new(Store::open(&config).unwrap());
        let mut log = GroupLog::open(&store, GROUPS[0]).unwrap();
        append(&mut log, &mut models[0], 3, 100).await;
        let payload = EntryPayload::Normal(Command(Bytes::from(vec![1; 10_000])));
        let parts = keys::encode_entry(&Entry { log_id: log_id(0, 4), payload }).unwrap();
        assert_eq!(parts.len(), 3);
        for (part, value) in (0..).zip(parts).take(2) {
            store.with(|open| open.log.insert(keys::log_key(GROUPS[0], 4, part), value)).unwrap();
        }
        store.close();
    }
    holds(&config, &models).await;
    // The place is free for another entry, a shorter one.
    {
        let store = Arc::new(Store::open(&config).unwrap());
        let mut log = GroupLog::open(&store, GROUPS[0]).unwrap();
        append(&mut log, &mut models[0], 1, 10).await;
        store.close();
    }
    holds(&config, &models).await;
}

#[tokio::test]
async fn a_folder_from_before_the_journal_is_taken_over_and_marked() {
    let dir = tempfile::tempdir().unwrap();
    let config = HostConfig { log_cache_bytes: 8 << 20, ..HostConfig::new(RaftNodeId(1), dir.path().join("node")) };
    let mut models = GROUPS.map(|_| Model::default());
    {
        let store = Arc::new(Store::open(&config).unwrap());
        let mut log = GroupLog::open(&store, GROUPS[0]).unwrap();
        append(&mut log, &mut models[0], 3, 100).await;
        store.close();
    }
    // What an older build left: everything in the database, which closing made sure of.
    for number in 0..2 {
        fs::remove_file(config.dir.join(format!("journal-{number}"))).unwrap();
    }
    fs::write(config.dir.join("FORMAT"), "quarry-raft 1\nnode 1\n").unwrap();
    holds(&config, &models).await;
    assert_eq!(fs::read_to_string(config.dir.join("FORMAT")).unwrap(), "quarry-raft 2\nnode 1\n");
}
