//! A meta node that lies: what it says about a value is believed only as far as a data node signed it (*Nothing unsigned*).
//!
//! A forger stands between a client and the real meta nodes: it passes all calls on and changes the answers to Resolve.

use quarry_client::{CallError, Client, Cluster, GetError, Options};
use quarry_proto::v1::{
    self,
    control_server::{Control, ControlServer},
};
use quarry_tests::{
    calls::{self, Answer, Calls, Turned, at_leader},
    seed::pattern,
    shared_without_tls,
};
use std::{
    future::Future,
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::{net::TcpListener, task::JoinHandle};
use tonic::{
    Request, Response, Status,
    transport::{Server, server::TcpIncoming},
};

type Change = fn(&mut v1::ResolveReply);

#[derive(Clone)]
struct Forger {
    metas: Vec<String>,
    own: String,
    change: Arc<Mutex<Option<Change>>>,
}

/// Stops the forger's server when dropped.
struct Running(JoinHandle<()>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Forger {
    async fn start(metas: Vec<String>) -> (Self, Running) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let own = listener.local_addr().unwrap().to_string();
        let forger = Self { metas, own, change: Arc::default() };
        let service = ControlServer::new(forger.clone());
        let server = Server::builder().add_service(service).serve_with_incoming(TcpIncoming::from(listener));
        let running = Running(tokio::spawn(async move { server.await.unwrap() }));
        (forger, running)
    }

    async fn pass<T, F: Future<Output = Answer<T>>>(
        &self,
        call: impl FnMut(v1::control_client::ControlClient<Calls>) -> F,
    ) -> Result<T, Status> {
        at_leader(&self.metas, call).await.map_err(|turned| match turned {
            Turned::Refused(refusal) => refusal.into_status(),
            Turned::Fault(status) => status,
        })
    }
}

macro_rules! passed_on {
    ($($name:ident: $request:ty => $reply:ty;)*) => {
        #[tonic::async_trait]
        impl Control for Forger {
            async fn describe(&self, asked: Request<v1::DescribeRequest>) -> Result<Response<v1::DescribeReply>, Status> {
                let asked = asked.into_inner();
                let mut reply = self.pass(|mut control| async move { calls::done(control.describe(asked)).await }).await?;
                for group in &mut reply.groups {
                    group.address.clone_from(&self.own);
                }
                for meta in &mut reply.metas {
                    meta.address.clone_from(&self.own);
                }
                Ok(Response::new(reply))
            }

            async fn resolve(&self, asked: Request<v1::ResolveRequest>) -> Result<Response<v1::ResolveReply>, Status> {
                let asked = asked.into_inner();
                let mut reply = self
                    .pass(|mut control| {
                        let asked = asked.clone();
                        async move { calls::done(control.resolve(asked)).await }
                    })
                    .await?;
                let change = *self.change.lock().unwrap();
                if let Some(change) = change {
                    change(&mut reply);
                }
                Ok(Response::new(reply))
            }

            $(async fn $name(&self, asked: Request<$request>) -> Result<Response<$reply>, Status> {
                let asked = asked.into_inner();
                let reply = self
                    .pass(|mut control| {
                        let asked = asked.clone();
                        async move { calls::done(control.$name(asked)).await }
                    })
                    .await?;
                Ok(Response::new(reply))
            })*
        }
    };
}

passed_on! {
    create_namespace: v1::CreateNamespaceRequest => v1::CreateNamespaceReply;
    grant: v1::GrantRequest => v1::GrantReply;
    publish: v1::PublishRequest => v1::PublishReply;
    seal: v1::SealRequest => v1::SealReply;
    delete: v1::DeleteRequest => v1::DeleteReply;
    pin: v1::PinRequest => v1::PinReply;
    renew_pin: v1::RenewPinRequest => v1::RenewPinReply;
    release_pin: v1::ReleasePinRequest => v1::ReleasePinReply;
    exists: v1::ExistsRequest => v1::ExistsReply;
    list: v1::ListRequest => v1::ListReply;
}

fn flip(bytes: &bytes::Bytes, at: usize) -> bytes::Bytes {
    let mut changed = bytes.to_vec();
    changed[at] ^= 1;
    changed.into()
}

/// Every way in which the description of the first key's copies can be changed. The second key's are there to be taken instead.
const CHANGES: [(&str, Change); 14] = [
    ("the slot", |reply| reply.items[0].copies.iter_mut().for_each(|copy| copy.slot ^= 1)),
    ("the leaf", |reply| reply.items[0].copies.iter_mut().for_each(|copy| copy.leaf ^= 1)),
    ("the path", |reply| {
        reply.items[0].copies.iter_mut().for_each(|copy| {
            copy.path.pop();
        })
    }),
    ("the CRC", |reply| reply.items[0].payload_crc ^= 1),
    ("the length", |reply| reply.items[0].payload_bytes -= 1),
    ("the kind", |reply| reply.items[0].set_kind(v1::FrameKind::Page)),
    ("the version", |reply| reply.items[0].version.as_mut().unwrap().clock += 1),
    ("the item", |reply| reply.items[0] = reply.items[1].clone()),
    ("the base", |reply| reply.batches.iter_mut().for_each(|batch| batch.base += 4096)),
    ("the slot size", |reply| reply.batches.iter_mut().for_each(|batch| batch.slot_size += 64)),
    ("the incarnation", |reply| {
        reply.batches.iter_mut().for_each(|batch| batch.incarnation.as_mut().unwrap().number += 1)
    }),
    ("the node", |reply| reply.batches.iter_mut().for_each(|batch| batch.region.as_mut().unwrap().node ^= 3)),
    ("the signature", |reply| {
        reply.batches.iter_mut().for_each(|batch| batch.signed = flip(&batch.signed, batch.signed.len() - 1))
    }),
    ("the root", |reply| {
        reply.batches.iter_mut().for_each(|batch| batch.signed = flip(&batch.signed, batch.signed.len() - 70))
    }),
];

#[tokio::test]
async fn a_forged_descriptor_is_never_believed() {
    let cluster = shared_without_tls().await;
    let (_client, blocks) = cluster.namespace().await;
    // Two values of one batch, so that there are paths and neighbours.
    let items = ["one", "two"].map(|name| {
        let key = quarry_wire::key::Key::new(name).unwrap();
        quarry_client::PutItem::create(key, pattern(name.len() as u64 + u64::from(name == "two"), 2_000))
    });
    for result in blocks.put_many(items.to_vec()).await {
        result.unwrap();
    }
    let keys = ["one", "two"].map(|name| quarry_wire::key::Key::new(name).unwrap());
    let expected = blocks.get("one").await.unwrap().unwrap();

    let real = Cluster::from_file(cluster.cluster_file()).unwrap();
    let (forger, _running) = Forger::start(real.metas.clone()).await;
    let cluster_of_forger = Cluster::new(real.uuid, real.root, vec![forger.own.clone()]).unwrap().without_tls();
    let options = Options { timeout: Duration::from_secs(2), ..Options::default() };
    let client = Client::connect(cluster_of_forger, options).await.unwrap();
    let theirs = client.namespace(&blocks.info().name).await.unwrap().fresh();
    let honest = theirs.get_many(&keys).await;
    assert_eq!(honest[0].as_ref().unwrap().as_ref().unwrap().version, expected.version);
    for (what, change) in CHANGES {
        *forger.change.lock().unwrap() = Some(change);
        let forged = theirs.get_many(&keys).await.swap_remove(0);
        match forged {
            Err(
                GetError::Call(CallError::Untrusted { .. })
                | GetError::Corrupt { .. }
                | GetError::Unreachable { .. }
                | GetError::Deadline { .. },
            ) => {}
            // The size of a slot is not signed, the place of the frame is: what does not move the frame does no harm.
            Ok(Some(value)) if what == "the slot size" => assert_eq!(value, expected),
            Ok(value) => panic!("{what} was changed and believed: {:?}", value.map(|value| value.version)),
            Err(other) => panic!("{what} was changed: {other:?}"),
        }
    }
    *forger.change.lock().unwrap() = None;
    let honest = theirs.get_many(&keys).await;
    assert_eq!(honest[0].as_ref().unwrap().as_ref().unwrap().bytes, expected.bytes);
}
