//! Values that are pinned while they are read.

use crate::{cluster, content, double::Double, into::Jumps, until};
use quarry_client::{
    CallError, Client, Clock, GetError, Key, Namespace, NamespaceSpec, Options, PinError, PutItem, PutMode, Refusal,
};
use quarry_proto::v1;
use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

const MINUTE: Duration = Duration::from_secs(60);

fn key(name: &str) -> Key {
    Key::new(name).unwrap()
}

fn calls(client: &Client, method: &str) -> u64 {
    client.stats().control_calls.get(method).copied().unwrap_or(0)
}

/// A cluster whose client's clock can be set ahead.
async fn clocked() -> (Double, Client, Namespace, Arc<Jumps>) {
    let (double, clock) = (Double::start(2).await, Arc::new(Jumps::default()));
    let client = double.connect(Options { clock: Arc::clone(&clock) as Arc<dyn Clock>, ..Options::default() }).await;
    let blocks = client.create_namespace(NamespaceSpec::cache("kv")).await.unwrap();
    (double, client, blocks, clock)
}

#[tokio::test(flavor = "multi_thread")]
async fn every_way_to_read_through_a_pin_shows_the_value_that_was_pinned_whatever_became_of_its_key() {
    for length in [3_000, 300_000] {
        let (double, client, blocks) = cluster(2, Options::default()).await;
        let names = [key("replaced"), key("deleted"), key("absent"), key("kept")];
        let mut versions = Vec::new();
        for (seed, name) in [(1, &names[0]), (2, &names[1]), (4, &names[3])] {
            versions.push(blocks.put(name, content(seed, length)).await.unwrap());
        }
        let pin = blocks.pin(&names, MINUTE).await.unwrap();
        assert_eq!(double.pins().iter().sum::<usize>(), 3);
        assert!(pin.remaining() > MINUTE / 2 && pin.remaining() < MINUTE);
        blocks.put_with(&names[0], content(9, length), PutMode::Replace).await.unwrap();
        blocks.delete(&names[1]).await.unwrap();
        blocks.put(&names[2], "later").await.unwrap();
        assert!(blocks.get(&names[0]).await.unwrap().unwrap().bytes == content(9, length), "its key goes on");
        let resolves = calls(&client, "Resolve");
        let buffers = client.buffers(4 << 20).unwrap();
        let all = pin.get_many(&names).await;
        let items = names.iter().map(|name| (name.clone(), buffers.try_take(1 << 19).unwrap())).collect();
        let into = pin.get_into_many(items).await;
        for (place, (value, (mut buffer, got))) in all.into_iter().zip(into).enumerate() {
            let (value, got) = (value.unwrap(), got.unwrap());
            let one = pin.get(&names[place]).await.unwrap();
            let (_, other) = pin.get_into(&names[place], buffers.try_take(1 << 19).unwrap()).await;
            assert_eq!((&one, other.unwrap()), (&value, got));
            let expected = [Some((1, versions[0])), Some((2, versions[1])), None, Some((4, versions[2]))][place];
            assert_eq!(pin.version(&names[place]), expected.map(|(_, version)| version));
            assert_eq!(pin.payload_bytes(&names[place]), expected.map(|_| length as u64));
            match expected {
                None => assert!(value.is_none() && got.is_none()),
                Some((seed, version)) => {
                    let value = value.unwrap();
                    assert!(value.bytes == content(seed, length) && value.version == version);
                    assert_eq!(got.unwrap().version, version);
                    assert!(buffer.bytes()[..length] == content(seed, length));
                }
            }
        }
        assert_eq!(calls(&client, "Resolve"), resolves, "nobody was asked");
        assert!(pin.get("never named").await.unwrap().is_none());
        pin.release().await.unwrap();
        assert!(double.pins().is_empty());
        client.close().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pin_that_is_dropped_is_released_and_so_is_what_was_pinned_when_the_rest_was_refused() {
    let (double, client, blocks) = cluster(2, Options::default()).await;
    // Of both shards, and more than fit under one name.
    let keys: Vec<Key> = (0..1_400).map(|number| key(&format!("key-{number}"))).collect();
    let puts = blocks.put_many(keys.iter().map(|key| PutItem::create(key.clone(), "x")).collect()).await;
    assert!(puts.iter().all(Result::is_ok));
    let pin = blocks.pin(&keys, MINUTE).await.unwrap();
    assert!(double.pins().len() >= 3, "{:?}", double.pins());
    assert_eq!(double.pins().iter().sum::<usize>(), keys.len());
    assert!(pin.get_many(&keys).await.iter().all(|value| matches!(value, Ok(Some(_)))));
    drop(pin);
    until("what was dropped is released", || double.pins().is_empty()).await;
    double.faults().refuse_pins.push_back(Refusal::Malformed(v1::Malformed::default()));
    let refused = blocks.pin(&keys, MINUTE).await;
    assert!(matches!(refused, Err(PinError::Call(_))), "{refused:?}");
    until("the other parts are released", || double.pins().is_empty()).await;
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_read_through_a_pin_that_is_over_unless_it_was_renewed_in_time() {
    let (_double, client, blocks, clock) = clocked().await;
    blocks.put("key", content(1, 3_000)).await.unwrap();
    let pin = blocks.pin(&[key("key")], MINUTE).await.unwrap();
    clock.ahead_ms.fetch_add(50_000, Ordering::SeqCst);
    pin.get("key").await.unwrap().unwrap();
    pin.renew(MINUTE).await.unwrap();
    clock.ahead_ms.fetch_add(50_000, Ordering::SeqCst);
    pin.get("key").await.unwrap().unwrap();
    pin.renew(Duration::from_millis(1)).await.unwrap();
    clock.ahead_ms.fetch_add(5_000, Ordering::SeqCst);
    pin.get("key").await.unwrap().expect("a shorter time takes nothing from it");
    clock.ahead_ms.fetch_add(5_000, Ordering::SeqCst);
    assert_eq!(pin.remaining(), Duration::ZERO);
    let reads = client.stats().fabric_reads;
    assert!(matches!(pin.get("key").await, Err(GetError::PinOver)));
    let buffers = client.buffers(1 << 16).unwrap();
    let (_, into) = pin.get_into("key", buffers.try_take(1 << 14).unwrap()).await;
    assert!(matches!(into, Err(GetError::PinOver)), "{into:?}");
    assert_eq!(client.stats().fabric_reads, reads);
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_that_came_after_the_end_of_a_pin_are_not_shown() {
    let (_double, client, blocks, clock) = clocked().await;
    blocks.put("key", content(1, 3_000)).await.unwrap();
    let pin = blocks.pin(&[key("key")], Duration::from_secs(5)).await.unwrap();
    pin.get("key").await.unwrap().unwrap();
    // Chosen, read, checked: at each of these the clock is looked at once. It jumps by six seconds.
    clock.looks.store(3, Ordering::SeqCst);
    let reads = client.stats().fabric_reads;
    assert!(matches!(pin.get("key").await, Err(GetError::PinOver)));
    assert_eq!((client.stats().fabric_reads, clock.looks.load(Ordering::SeqCst)), (reads + 1, 0));
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pin_counts_from_sending_its_request_and_so_does_its_renewal() {
    let (_double, client, blocks, clock) = clocked().await;
    blocks.put("key", content(1, 3_000)).await.unwrap();
    let five = Duration::from_secs(5);
    // The first look is at sending; at the second one it is six seconds later.
    clock.looks.store(2, Ordering::SeqCst);
    let pin = blocks.pin(&[key("key")], five).await.unwrap();
    assert_eq!(pin.remaining(), Duration::ZERO);
    assert!(matches!(pin.get("key").await, Err(GetError::PinOver)));
    clock.looks.store(2, Ordering::SeqCst);
    pin.renew(five).await.unwrap();
    assert_eq!(pin.remaining(), Duration::ZERO);
    assert!(matches!(pin.get("key").await, Err(GetError::PinOver)));
    pin.renew(five).await.unwrap();
    pin.get("key").await.unwrap().unwrap();
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pin_lasts_no_longer_than_its_shard_said_whatever_was_asked_for() {
    let (double, client, blocks, clock) = clocked().await;
    blocks.put("key", content(1, 3_000)).await.unwrap();
    double.faults().pin_ms_max = Some(10_000);
    let pin = blocks.pin(&[key("key")], MINUTE).await.unwrap();
    for _ in 0..2 {
        clock.ahead_ms.fetch_add(5_000, Ordering::SeqCst);
        pin.get("key").await.unwrap().unwrap();
        pin.renew(MINUTE).await.unwrap();
    }
    clock.ahead_ms.fetch_add(10_000, Ordering::SeqCst);
    assert!(matches!(pin.get("key").await, Err(GetError::PinOver)));
    let pin = blocks.pin(&[key("key")], MINUTE).await.unwrap();
    clock.ahead_ms.fetch_add(10_000, Ordering::SeqCst);
    assert!(matches!(pin.get("key").await, Err(GetError::PinOver)));
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn refusals_of_pins_say_what_there_is_too_much_of_and_when_to_come_again() {
    let (double, client, blocks) = cluster(2, Options::default()).await;
    blocks.put("key", "value").await.unwrap();
    let names = [key("key")];
    let limited = v1::TooManyRequests {
        resource: "pins of one client in a shard".to_owned(),
        limit: 7,
        found: 8,
        retry_after_ms: 90_000,
    };
    double.faults().refuse_pins.push_back(Refusal::TooManyRequests(limited));
    match blocks.pin(&names, MINUTE).await {
        Err(PinError::TooMany { resource, limit, retry_after }) => {
            assert_eq!((&resource[..], limit, retry_after), ("pins of one client in a shard", 7, MINUTE * 3 / 2));
        }
        other => panic!("{other:?}"),
    }
    for duration in [Duration::ZERO, Duration::from_micros(999), MINUTE * 10 + Duration::from_millis(1)] {
        let refused = blocks.pin(&names, duration).await;
        assert!(matches!(refused, Err(PinError::Duration { found, .. }) if found == duration), "{refused:?}");
    }
    let pin = blocks.pin(&names, MINUTE).await.unwrap();
    assert!(matches!(pin.renew(Duration::ZERO).await, Err(PinError::Duration { .. })));
    double.end_pins();
    assert!(matches!(pin.renew(MINUTE).await, Err(PinError::Over)));
    pin.release().await.expect("what is over need not be released");
    let nothing = blocks.pin(&[key("absent")], MINUTE).await.unwrap();
    assert!(nothing.get("absent").await.unwrap().is_none() && double.pins().is_empty());
    nothing.renew(MINUTE).await.unwrap();
    nothing.release().await.unwrap();
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_copy_of_a_pinned_value_is_never_shown_and_the_other_one_is_read() {
    let (double, client, blocks) = cluster(2, Options::default()).await;
    blocks.put("key", content(1, 3_000)).await.unwrap();
    let pin = blocks.pin(&[key("key")], MINUTE).await.unwrap();
    for holder in 0..2 {
        double.damage("key", holder);
        let read = pin.get("key").await;
        if holder == 0 {
            assert!(read.unwrap().unwrap().bytes == content(1, 3_000));
        } else {
            assert!(matches!(read, Err(GetError::Corrupt { .. })), "{read:?}");
        }
    }
    assert!(client.stats().damaged_copies > 0);
    client.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_newer_revocation_list_voids_what_its_keys_signed_also_under_a_pin_and_nothing_else() {
    let (double, client, blocks) = cluster(2, Options::default()).await;
    let mut spec = NamespaceSpec::cache("lone");
    spec.copies = 1;
    let lone = client.create_namespace(spec).await.unwrap();
    lone.put("key", content(1, 3_000)).await.unwrap();
    let pin = lone.pin(&[key("key")], MINUTE).await.unwrap();
    pin.get("key").await.unwrap().unwrap();
    // All that the client hears of a list is its number, in an answer about something else.
    let hear = async |number, holder| {
        double.revoke(number, &[holder]);
        double.faults().revocations = number;
        assert!(blocks.get("absent").await.unwrap().is_none());
    };
    hear(4, 1).await;
    assert!(pin.get("key").await.unwrap().unwrap().bytes == content(1, 3_000), "its one holder is believed still");
    hear(5, 0).await;
    let reads = client.stats().fabric_reads;
    let voided = pin.get("key").await;
    assert!(matches!(voided, Err(GetError::Call(CallError::Untrusted { .. }))), "{voided:?}");
    assert_eq!(client.stats().fabric_reads, reads, "nothing was read through what a revoked key signed");
    client.close().await.unwrap();
}
