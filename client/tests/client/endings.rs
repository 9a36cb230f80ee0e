//! Slabs that end, futures that are dropped, clients that are closed.

use crate::{cluster, content, until};
use futures::FutureExt as _;
use quarry_client::{CallError, GetError, Key, Options, PutError, PutItem};
use std::time::Duration;
use tokio::time::{Instant, sleep};

#[tokio::test(flavor = "multi_thread")]
async fn closing_seals_every_slab_at_its_fill_mark_and_ends_all_work() {
    let (double, client, blocks) = cluster(2, Options::default()).await;
    for number in 0..5 {
        blocks.put(format!("{{tag}}{number}"), content(number, 1000)).await.unwrap();
    }
    let other = client.clone();
    client.close().await.unwrap();
    let (marks, open) = double.seals();
    assert_eq!((marks.iter().sum::<u32>(), open), (5, 0));
    assert_eq!(other.background_tasks(), 0);
    assert!(matches!(blocks.put("late", "x").await, Err(PutError::Call(CallError::Closed))));
    assert!(matches!(blocks.get("late").await, Err(GetError::Call(CallError::Closed))));
}

#[tokio::test(flavor = "multi_thread")]
async fn dropping_the_last_clone_ends_all_work_too() {
    let (double, client, blocks) = cluster(2, Options::default()).await;
    blocks.put("key", "value").await.unwrap();
    assert!(client.background_tasks() > 0, "the slab has a keeper");
    drop(client);
    assert!(double.seals().1 > 0, "a namespace is a clone too");
    blocks.put("{key}2", "value").await.unwrap();
    drop(blocks);
    until("all slabs are sealed", || double.seals().1 == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_slab_is_sealed_and_the_next_put_opens_another() {
    let (double, client, blocks) = cluster(2, Options { idle: Duration::from_millis(50), ..Options::default() }).await;
    blocks.put("{tag}1", "value").await.unwrap();
    until("the slab is sealed", || double.seals() == (vec![1], 0)).await;
    until("its keeper is gone", || client.background_tasks() == 0).await;
    blocks.put("{tag}2", "value").await.unwrap();
    assert_eq!(double.grants().len(), 2);
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn slabs_grow_with_use_and_the_next_one_is_there_before_it_is_needed() {
    let (double, client, blocks) = cluster(2, Options::default()).await;
    for number in 0..40 {
        blocks.put(format!("{{tag}}{number}"), "value").await.unwrap();
    }
    until("the second slab is there", || double.grants().len() >= 2).await;
    // Of two shards each begins with half of what a lone one would.
    assert_eq!(double.grants()[..2], [8, 32]);
    client.close().await.unwrap();
    assert_eq!(double.seals().1, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_write_begins_late_in_the_life_of_a_grant() {
    let (double, client, blocks) = cluster(2, Options::default()).await;
    double.faults().ttl = Some(Duration::from_millis(400));
    blocks.put("{tag}1", "value").await.unwrap();
    until("the slab is sealed before its end", || double.seals().1 == 0).await;
    blocks.put("{tag}2", "value").await.unwrap();
    assert_eq!(double.grants().len(), 2);
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_put_takes_effect_as_a_whole_or_not_at_all_and_gives_its_window_back() {
    let (_double, client, blocks) = cluster(2, Options::default()).await;
    let bytes = content(7, 300_000);
    for number in 0..60_u64 {
        let put = blocks.put(format!("{{tag}}{number}"), bytes.clone());
        // At another place each time.
        tokio::select! {
            _ = put => {}
            () = sleep(Duration::from_micros(number * 150)) => {}
        }
    }
    let keys: Vec<Key> = (0..60).map(|number| Key::new(format!("{{tag}}{number}")).unwrap()).collect();
    for value in blocks.fresh().get_many(&keys).await {
        assert!(value.unwrap().is_none_or(|value| value.bytes == bytes));
    }
    // Needs nearly the whole window.
    let large = vec![PutItem::create(Key::new("large").unwrap(), content(1, 60 << 20))];
    blocks.put_many(large).await.pop().unwrap().unwrap();
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn dropped_gets_leave_nothing_behind() {
    let (_double, client, blocks) = cluster(2, Options::default()).await;
    let bytes = content(3, 2 << 20);
    blocks.put("key", bytes.clone()).await.unwrap();
    for number in 0..30_u64 {
        let get = blocks.get("key");
        tokio::select! {
            value = get => assert!(value.unwrap().unwrap().bytes == bytes),
            () = sleep(Duration::from_micros(number * 100)) => {}
        }
    }
    assert!(blocks.get("key").await.unwrap().unwrap().bytes == bytes);
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn every_call_ends_by_its_deadline_although_nobody_answers() {
    let short = Options { timeout: Duration::from_millis(1500), ..Options::default() };
    let (double, client, blocks) = cluster(2, short).await;
    blocks.put("{tag}1", "value").await.unwrap();
    double.faults().silent = true;
    let began = Instant::now();
    assert!(blocks.put("{tag}2", "value").await.is_err());
    assert!(blocks.fresh().get("{tag}1").await.is_err());
    assert!(blocks.delete("{tag}1").await.is_err());
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
    let closing = client.close();
    assert!(tokio::time::timeout(Duration::from_secs(5), closing).await.is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_put_that_was_never_polled_does_nothing() {
    let (double, client, blocks) = cluster(2, Options::default()).await;
    drop(blocks.put("key", "value"));
    let mut polled_once = Box::pin(blocks.put("key", "value"));
    assert!((&mut polled_once).now_or_never().is_none());
    drop(polled_once);
    client.close().await.unwrap();
    assert_eq!(double.keys(), 0);
}
