//! Pins: values that are kept where they are for long reads.
//!
//! What a pin keeps is answered like a resolve, from the state in which the pin was made or a later one: what is pinned is there until the pin
//! ends. The commands are idempotent by their request; a release is so by itself, since no pin's name is used again.

use super::{
    control::{key_of_shard, known_namespace},
    request_id,
    resolve::{add_news, show},
    strange,
};
use crate::{
    core::{Core, millis_u32},
    door,
    grants::request_refused,
};
use quarry_meta_state::shard::{
    PinMiss, PinRefusal, PinRequest, Pinned, RenewRefusal, Resolved, ShardCommand, ShardOutcome,
};
use quarry_proto::{
    convert::{self, required},
    refusal::Refusal,
    v1,
};
use quarry_wire::{
    ids::{NamespaceId, PinId, ShardId},
    key::Key,
    limits::{KEYS_PER_PIN_MAX, PIN_KEY_BYTES_MAX},
    units::millis,
    version::Version,
};
use std::{collections::BTreeMap, time::Duration};
use tokio::time::Instant;

pub(super) async fn pin(core: &Core, asked: v1::PinRequest, deadline: Instant) -> Result<v1::PinReply, Refusal> {
    let shard = core.shard(ShardId(asked.shard))?;
    shard.hosted.leads()?;
    let (owner, namespace) = (convert::writer_id(&asked.owner)?, NamespaceId(asked.namespace));
    if asked.keys.len() > KEYS_PER_PIN_MAX {
        return Err(door::too_large("keys", KEYS_PER_PIN_MAX, asked.keys.len()));
    }
    let keys: Result<Vec<Key>, Refusal> =
        asked.keys.iter().map(|key| key_of_shard(core, shard, namespace, key)).collect();
    let keys = keys?;
    let bytes = keys.iter().map(|key| key.as_bytes().len()).sum();
    if bytes > PIN_KEY_BYTES_MAX {
        return Err(door::too_large("the keys of a pin", PIN_KEY_BYTES_MAX, bytes));
    }
    core.catch_up(shard, asked.seen, deadline).await?;
    let duration = Duration::from_millis(asked.duration_ms.into());
    let request = PinRequest { request: request_id(asked.request, 0)?, owner, namespace, keys: keys.clone(), duration };
    let done = shard.hosted.propose(ShardCommand::Pin(request), deadline).await?;
    let pinned = match done.outcome {
        ShardOutcome::Pin(Ok(pinned)) => pinned,
        ShardOutcome::Pin(Err(refusal)) => return Err(pin_refused(refusal)),
        other => return Err(strange(&other)),
    };
    for outcome in &pinned.keys {
        if let Err(PinMiss::WrongShard { expected, found }) = outcome {
            return Err(Refusal::WrongShard(v1::WrongShard { expected: expected.0, found: found.0 }));
        }
    }
    if pinned.pin.is_none() {
        core.directory.read(|directory| known_namespace(directory, namespace))?;
    }
    let values = shard.hosted.read(|state| {
        let kept = match pinned.pin {
            Some(pin) => state.pinned(owner, pin).ok_or_else(|| unknown(pin))?,
            None => Vec::new(),
        };
        let use_of = Some((&shard.eviction.uses, done.at));
        Ok(show(state, &shard.trees, in_order(&keys, &pinned, kept), use_of))
    });
    let mut values: v1::ResolveReply = values?;
    values.lease_ms = millis_u32(pinned.term.duration);
    values.applied_ms = done.at.0;
    add_news(core, &mut values, asked.seen);
    let (pin, until_ms) = (pinned.pin.map(Into::into), pinned.term.until.0);
    Ok(v1::PinReply { pin, values: Some(values), until_ms })
}

/// The values that are kept, key by key as they were named. A value whose copies are lost is none.
fn in_order(keys: &[Key], pinned: &Pinned, kept: Vec<Resolved>) -> Vec<Option<Resolved>> {
    let kept: BTreeMap<(Key, Version), Resolved> = (kept.into_iter())
        .filter(|value| !value.copies.is_empty())
        .map(|value| ((value.key.clone(), value.version), value))
        .collect();
    let value = |(name, outcome): (&Key, &Result<Version, PinMiss>)| {
        outcome.ok().and_then(|version| kept.get(&(name.clone(), version)).cloned())
    };
    keys.iter().zip(&pinned.keys).map(value).collect()
}

pub(super) async fn renew(
    core: &Core,
    asked: v1::RenewPinRequest,
    deadline: Instant,
) -> Result<v1::RenewPinReply, Refusal> {
    let shard = core.shard(ShardId(asked.shard))?;
    shard.hosted.leads()?;
    let (owner, pin): (_, PinId) = (convert::writer_id(&asked.owner)?, required("pin", asked.pin)?.into());
    let duration = Duration::from_millis(asked.duration_ms.into());
    let command = ShardCommand::Renew { request: request_id(asked.request, 0)?, owner, pin, duration };
    let done = shard.hosted.propose(command, deadline).await?;
    match done.outcome {
        ShardOutcome::Renew(Ok(term)) => Ok(v1::RenewPinReply {
            duration_ms: millis_u32(term.duration),
            until_ms: term.until.0,
            applied_ms: done.at.0,
        }),
        ShardOutcome::Renew(Err(refusal)) => Err(renew_refused(refusal)),
        other => Err(strange(&other)),
    }
}

pub(super) async fn release(
    core: &Core,
    asked: v1::ReleasePinRequest,
    deadline: Instant,
) -> Result<v1::ReleasePinReply, Refusal> {
    let shard = core.shard(ShardId(asked.shard))?;
    shard.hosted.leads()?;
    let (owner, pin) = (convert::writer_id(&asked.owner)?, required("pin", asked.pin)?.into());
    let done = shard.hosted.propose(ShardCommand::Release { owner, pin }, deadline).await?;
    match done.outcome {
        ShardOutcome::Release { held } => Ok(v1::ReleasePinReply { held, applied_ms: done.at.0 }),
        other => Err(strange(&other)),
    }
}

fn unknown(pin: PinId) -> Refusal {
    Refusal::UnknownPin(v1::UnknownPin { pin: Some(pin.into()) })
}

fn duration_refused(most: Duration, found: Duration) -> Refusal {
    Refusal::malformed("duration_ms", format_args!("1 to {}", millis(most)), millis(found))
}

/// The refusal in the words of the protocol.
fn pin_refused(refusal: PinRefusal) -> Refusal {
    let too_many = |resource: &str, limit: u32, retry_after: Duration| {
        Refusal::TooManyRequests(v1::TooManyRequests {
            resource: resource.to_owned(),
            limit: limit.into(),
            found: u64::from(limit) + 1,
            retry_after_ms: millis(retry_after),
        })
    };
    match refusal {
        PinRefusal::Request(refusal) => request_refused(refusal),
        PinRefusal::Duration { most, found } => duration_refused(most, found),
        PinRefusal::Keys { most, found } => Refusal::malformed("keys", format_args!("1 to {most} keys"), found),
        PinRefusal::OwnersPins { limit, retry_after } => too_many("pins of one client in a shard", limit, retry_after),
        PinRefusal::ShardsPins { limit, retry_after } => too_many("pins of a shard", limit, retry_after),
    }
}

fn renew_refused(refusal: RenewRefusal) -> Refusal {
    match refusal {
        RenewRefusal::Request(refusal) => request_refused(refusal),
        RenewRefusal::Duration { most, found } => duration_refused(most, found),
        RenewRefusal::UnknownPin { pin } => unknown(pin),
    }
}
