//! Namespaces: made once, known to all.

use quarry_client::{CallError, NamespaceError, NamespaceSpec};
use quarry_proto::{refusal::Refusal, v1};
use quarry_tests::{
    calls::{self, at_leader, refusal},
    cluster::fresh_name,
    raw::Wish,
    shared,
};
use quarry_wire::ids::NamespaceId;
use std::time::Duration;

#[tokio::test]
async fn a_namespace_is_made_once_and_found_by_all() {
    let cluster = shared().await;
    let client = cluster.client().await;
    let name = fresh_name("once");
    let made = client.create_namespace(NamespaceSpec::cache(&name)).await.unwrap();
    match client.create_namespace(NamespaceSpec::cache(&name)).await {
        Err(NamespaceError::Exists { name: found }) => assert_eq!(found, name),
        other => panic!("{other:?}"),
    }
    let other = cluster.client().await;
    assert_eq!(other.namespace(&name).await.unwrap().info().id, made.info().id);
    assert!(other.list_namespaces().await.unwrap().iter().any(|it| it.name == name));
}

#[tokio::test]
async fn an_unknown_namespace_is_named_in_the_error() {
    let cluster = shared().await;
    let client = cluster.client().await;
    let name = fresh_name("nowhere");
    match client.namespace(&name).await {
        Err(NamespaceError::Call(CallError::UnknownNamespace { what })) => assert!(what.contains(&name)),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn impossible_policies_are_refused() {
    let cluster = shared().await;
    let client = cluster.client().await;
    for (copies, least) in [(4, None), (2, Some(3)), (0, Some(1))] {
        let mut spec = NamespaceSpec::cache(fresh_name("impossible"));
        (spec.copies, spec.least) = (copies, least);
        let refused = client.create_namespace(spec).await;
        assert!(matches!(refused, Err(NamespaceError::Invalid { .. })), "{copies}/{least:?}: {refused:?}");
    }
}

#[tokio::test]
async fn keys_of_one_namespace_are_not_seen_in_another() {
    let cluster = shared().await;
    let (_one_client, one) = cluster.namespace().await;
    let (_other_client, other) = cluster.namespace().await;
    one.put("key", "of one").await.unwrap();
    assert!(other.get("key").await.unwrap().is_none());
    other.put("key", "of the other").await.unwrap();
    assert_eq!(&one.get("key").await.unwrap().unwrap().bytes[..], b"of one");
}

#[tokio::test]
async fn the_servers_refuse_a_namespace_number_that_was_never_given() {
    let cluster = shared().await;
    let raw = cluster.raw().await;
    let unknown = NamespaceId(0x00ff_fff0);
    let wish = Wish { namespace: unknown, slot_size: 4096, slots: 1, ttl: Duration::ZERO, avoid: Vec::new() };
    assert!(matches!(refusal(raw.grant(&wish).await), Refusal::UnknownNamespace(it) if it.id == unknown.0));
    assert!(
        matches!(refusal(raw.resolve(unknown, &["key"]).await), Refusal::UnknownNamespace(it) if it.id == unknown.0)
    );
    let request = raw.request().await;
    let deleted = at_leader(raw.metas(), |mut control| async move {
        let items = vec![v1::DeleteItem { key: "key".into(), expected: None }];
        let request = v1::DeleteRequest { shard: 1, request: Some(request), namespace: unknown.0, items };
        calls::done(control.delete(request)).await
    })
    .await;
    // A delete of what cannot be there is refused or finds nothing; it never deletes.
    match deleted {
        Err(calls::Turned::Refused(Refusal::UnknownNamespace(it))) => assert_eq!(it.id, unknown.0),
        Ok(reply) => assert_eq!(reply.outcomes[0].code(), v1::delete_outcome::Code::NotFound),
        other => panic!("{other:?}"),
    }
    let client = cluster.client().await;
    assert!(client.namespace(&fresh_name("none")).await.is_err());
}
