//! The double of the fabric: it does what the real provider does where tests rely on it, and misbehaves where they ask for it.
//! Each test of `same` is the body of the test of that name on the real provider.

use crate::support::{Buffer, KIB, MIB, Target, config, in_the_double, open, pattern, soon, wait_for};
use quarry_fabric::{Access, Endpoint, EndpointConfig, Faults, OperationError};
use std::time::Duration;

/// Runs tests of the real provider in the double.
macro_rules! same {
    ($($module:ident::$test:ident),+ $(,)?) => {
        mod same {
            $(
                #[test]
                fn $test() {
                    crate::support::in_the_double(|_| crate::$module::$test());
                }
            )+
        }
    };
}

same! {
    basics::what_was_written_is_read_back,
    basics::a_completed_write_is_visible_at_once_in_the_targets_memory,
    basics::a_peer_connected_twice_stays_when_one_of_them_goes,
    basics::wrong_calls_are_refused_with_what_was_found,
    basics::a_port_in_use_and_an_unspecified_address_are_refused,
    basics::a_closed_endpoint_refuses_everything,
    basics::a_client_endpoint_opens_at_its_first_use_and_takes_any_memory,
    refusals::wrong_keys_are_refused_and_the_target_is_untouched,
    refusals::a_local_registration_is_of_no_use_to_peers,
    refusals::bytes_outside_of_the_registration_are_refused,
    refusals::a_closed_registration_is_refused_while_others_go_on,
    refusals::a_key_of_one_endpoint_is_refused_at_another,
    refusals::a_refused_write_of_one_client_does_not_disturb_another,
}

fn block_on(work: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(work);
}

/// Twin: `fences::closing_a_registration_does_not_stop_a_write_that_has_begun`.
#[test]
fn closing_a_registration_does_not_stop_a_write_that_has_begun() {
    in_the_double(|network| {
        block_on(async {
            let (target, client) = (Target::new(MIB), open());
            let address = target.endpoint.address();
            network.hold(&address);
            let peer = client.connect(&address).unwrap();
            let (buffer, span) = (Buffer::filled(&client, MIB, 7), target.writable.remote_span(0..MIB).unwrap());
            let write = client.write(&peer, buffer.whole(), span, soon());
            let fence = async {
                wait_for("the write begins", || (network.under_way(&address) == 1).then_some(()));
                target.writable.close();
                assert!(target.bytes().contains(&0), "the write is not whole yet");
                network.release(&address);
            };
            let (ended, ()) = tokio::join!(write, fence);
            assert_eq!(ended, Ok(()));
            assert_eq!(target.bytes(), vec![7; MIB]);
        });
    });
}

/// Twin: `fences::closing_the_endpoint_stops_a_write_that_has_begun`.
#[test]
fn closing_the_endpoint_stops_a_write_that_has_begun() {
    in_the_double(|network| {
        block_on(async {
            let (target, client) = (Target::new(MIB), open());
            let address = target.endpoint.address();
            network.hold(&address);
            let peer = client.connect(&address).unwrap();
            let (buffer, span) = (Buffer::filled(&client, MIB, 7), target.writable.remote_span(0..MIB).unwrap());
            let write = client.write(&peer, buffer.whole(), span, soon());
            let fence = async {
                wait_for("the write begins", || (network.under_way(&address) == 1).then_some(()));
                target.endpoint.close();
                // The memory has a new owner.
                target.memory.copy_in(0, &vec![9; MIB]).unwrap();
                network.release(&address);
            };
            let (ended, ()) = tokio::join!(write, fence);
            assert!(matches!(ended, Err(OperationError::Failed { .. })), "{ended:?}");
            assert_eq!(target.bytes(), vec![9; MIB], "late bytes landed in memory that was given to another");
        });
    });
}

/// Twin: `peers::` tests of silent peers: an operation that is never answered ends with its deadline.
#[test]
fn an_operation_that_is_lost_ends_with_its_deadline_and_closes_its_endpoint() {
    in_the_double(|network| {
        block_on(async {
            let (target, client) = (Target::new(4 * KIB), open());
            network.set(Faults { lost_per_mille: 1_000, ..Faults::default() });
            let peer = client.connect(&target.endpoint.address()).unwrap();
            let (buffer, span) = (Buffer::filled(&client, 64, 1), target.writable.remote_span(0..64).unwrap());
            let soon = tokio::time::Instant::now() + Duration::from_millis(100);
            assert_eq!(client.write(&peer, buffer.whole(), span, soon).await, Err(OperationError::Deadline));
            assert!(client.is_closed());
            assert_eq!(client.in_flight(), 0);
        });
    });
}

/// Twin: `many::` tests: many operations at once all land, each in its place. Here they also overtake each other.
#[test]
fn operations_that_overtake_each_other_all_land_in_their_places() {
    in_the_double(|network| {
        block_on(async {
            let (target, client) = (Target::new(MIB), open());
            network.set(Faults { delay_most: Duration::from_millis(5), step_bytes: 1_000, ..Faults::default() });
            let peer = client.connect(&target.endpoint.address()).unwrap();
            let bytes = pattern(4, MIB);
            let buffer = Buffer::new(&client, MIB);
            buffer.memory.copy_in(0, &bytes).unwrap();
            let writes = (0..MIB / (16 * KIB)).map(|part| {
                let range = part * 16 * KIB..(part + 1) * 16 * KIB;
                let span = target.writable.remote_span(range.clone()).unwrap();
                client.write(&peer, buffer.span(range), span, soon())
            });
            assert!(futures::future::join_all(writes).await.into_iter().all(|ended| ended.is_ok()));
            assert_eq!(target.bytes(), bytes);
        });
    });
}

#[test]
fn an_endpoint_of_the_double_reaches_no_endpoint_of_another_network() {
    in_the_double(|_| {
        block_on(async {
            let here = Target::new(4 * KIB);
            let elsewhere = in_the_double(|_| Endpoint::open(config()).unwrap());
            let peer = elsewhere.connect(&here.endpoint.address()).unwrap();
            let buffer = Buffer::filled(&elsewhere, 64, 1);
            let span = here.writable.remote_span(0..64).unwrap();
            let soon = tokio::time::Instant::now() + Duration::from_millis(50);
            let ended = elsewhere.write(&peer, buffer.whole(), span, soon).await;
            assert!(ended.is_err(), "{ended:?}");
            assert_eq!(here.bytes(), vec![0; 4 * KIB]);
            drop(here.endpoint.register(&here.memory, 0..64, Access::RemoteRead, None).unwrap());
        });
    });
}

/// Twin: `large_reads_of_a_reader_that_fell_behind_do_not_wait_for_the_clock` in `tests/wakeups.rs`.
#[test]
fn what_takes_two_looks_does_not_wait_for_the_clock() {
    const TIMES: u64 = 64;
    in_the_double(|network| {
        network.set(Faults { looks: 2, ..Faults::default() });
        block_on(async {
            let target = Target::new(4 * KIB);
            let client = Endpoint::open(EndpointConfig { spin: EndpointConfig::SPIN, ..config() }).unwrap();
            let peer = client.connect(&target.endpoint.address()).unwrap();
            let buffer = Buffer::new(&client, 4 * KIB);
            for _ in 0..TIMES {
                let span = target.readable.remote_span(0..4 * KIB).unwrap();
                client.read(&peer, buffer.whole(), span, soon()).await.unwrap();
            }
            let late = client.found_by_clock();
            assert!(late < TIMES / 4, "{late} of {TIMES} operations were found by the clock alone");
        });
    });
}
