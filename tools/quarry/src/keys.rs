//! `quarry keys`: the root key of a cluster, and what it certifies.
//!
//! A node has two keys: one signs what it states (`node.key`, certified once, ended by revocation), one proves who it is to the other end of a
//! connection (in `tls.pem`, with a certificate that ends by its date and is made anew before).

use crate::{
    cli::{KeysCommand, Lasting, RevokeArgs},
    exit::{Code, Failure, Format},
};
use quarry::{
    config::NODE_CREDENTIALS,
    credentials::{self, Validity},
    identity::{Identity as Signer, Root, random},
    revocations::List,
    stdout::line,
};
use quarry_client::{Clock as _, SystemClock};
use quarry_trust::Identity;
use quarry_wire::{
    certificate::Role,
    ids::{CertificateSerial, NodeId},
};
use serde_json::json;
use std::{fs, path::Path, time::Duration};

/// File of a node's signing key, in its folder.
const NODE_KEY: &str = "node.key";
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

pub(crate) fn run(command: KeysCommand, format: Format) -> Result<(), Failure> {
    match command {
        KeysCommand::Revoke(args) => revoke(&args, format),
        KeysCommand::Root { out } => root(&out, format),
        KeysCommand::Node { root, role, id, addresses, out, new_key, lasting } => {
            let root = read(&root)?;
            signer(&root, role, NodeId(id), &out, new_key)?;
            node(&root, role, NodeId(id), &addresses, &out, &lasting, format)
        }
        KeysCommand::Client { root, roles, name, out, lasting } => {
            let root = read(&root)?;
            let identity = Identity::client(root.cluster, &roles, &name).map_err(Failure::usage)?;
            credentials::write(&out, &root, &identity, &[], validity(&lasting)).map_err(Failure::of)?;
            made(&identity, &[&out], &lasting, format)
        }
    }
}

fn root(out: &Path, format: Format) -> Result<(), Failure> {
    let root = Root::generate().map_err(Failure::error)?;
    root.write(out).map_err(Failure::of)?;
    let (cluster, public) = (root.cluster.to_string(), root.public().to_string());
    Ok(line(match format {
        Format::Json => json!({ "root": out, "cluster": cluster, "public": public }).to_string(),
        Format::Text => {
            let out = out.display();
            format!("{out}: the root key of a new cluster; keep it offline\nuuid = \"{cluster}\"\nroot = \"{public}\"")
        }
    })?)
}

fn node(
    root: &Root,
    role: Role,
    id: NodeId,
    addresses: &[String],
    out: &Path,
    lasting: &Lasting,
    format: Format,
) -> Result<(), Failure> {
    let identity = Identity::node(root.cluster, role, id).map_err(Failure::usage)?;
    let file = out.join(NODE_CREDENTIALS);
    credentials::write(&file, root, &identity, addresses, validity(lasting)).map_err(Failure::of)?;
    made(&identity, &[&out.join(NODE_KEY), &file], lasting, format)
}

/// Sees to it that the folder of a node has its signing key.
fn signer(root: &Root, role: Role, id: NodeId, out: &Path, new: bool) -> Result<(), Failure> {
    fs::create_dir_all(out).map_err(|wrong| Failure::of_file(out, &wrong))?;
    let key = out.join(NODE_KEY);
    let is_there = key.exists();
    if is_there {
        let held = Signer::read(&key, role, root.cluster, root.public()).map_err(Failure::of)?;
        if held.node() != id {
            let what = format!("{} is the key of {}, not of {id}", key.display(), held.node());
            return Err(Failure::new(Code::Conflict, what));
        }
        // A node keeps its signing key unless it is told otherwise: what it signed stays believed.
        if !new {
            return Ok(());
        }
    }
    // Random, since whoever has the root key need not remember what it certified.
    let serial = CertificateSerial(u64::from_le_bytes(random().map_err(Failure::error)?).max(1));
    let made = root.certify(serial, id, role).map_err(Failure::error)?;
    if is_there { made.write_over(&key) } else { made.write(&key) }.map_err(Failure::of)
}

/// Adds serials to the list in its file, under the next number.
fn revoke(args: &RevokeArgs, format: Format) -> Result<(), Failure> {
    let root = read(&args.root)?;
    let before = List::read(&args.list, root.cluster, root.public()).map_err(Failure::of)?;
    let list = List::after(before.as_ref(), &root, args.serials.iter().copied().map(CertificateSerial));
    list.write(&args.list).map_err(Failure::of)?;
    let said = &list.signed.statement;
    let serials: Vec<u64> = said.serials.iter().map(|serial| serial.0).collect();
    let (number, count, path) = (said.number, serials.len(), args.list.display());
    Ok(line(match format {
        Format::Json => json!({ "list": args.list, "number": number, "serials": serials }).to_string(),
        Format::Text => format!(
            "revocation list {number} with {count} serials is in {path}; tell the cluster: raft-admin revocation apply {path}"
        ),
    })?)
}

fn read(root: &Path) -> Result<Root, Failure> {
    Root::read(root).map_err(|wrong| Failure::of(wrong).hint("quarry keys root makes the root key of a new cluster"))
}

fn validity(lasting: &Lasting) -> Validity {
    Validity::lasting(SystemClock.wall_ms(), DAY * lasting.days)
}

fn made(identity: &Identity, files: &[&Path], lasting: &Lasting, format: Format) -> Result<(), Failure> {
    Ok(line(match format {
        Format::Json => json!({ "identity": identity.to_string(), "files": files, "days": lasting.days }).to_string(),
        Format::Text => {
            let files: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
            format!("{identity}, for {} days: {}", lasting.days, files.join(" "))
        }
    })?)
}
