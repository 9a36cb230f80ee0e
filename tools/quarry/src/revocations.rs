//! The revocation list: the file in which the root keeps it, and how a cluster is told.
//!
//! There is one list, which only grows: of two the one with the greater number holds, so a list that left out a serial would make it valid
//! again. The file can be read by anybody: it is signed, not secret.

use crate::{
    admin::CallError,
    identity::Root,
    members::{at_directory, request},
};
use quarry_proto::v1;
use quarry_trust::Trust;
use quarry_wire::{
    certificate::{Certificate, Revocations, Role},
    ids::{CertificateSerial, ClusterUuid},
    signed::{PublicKey, Signed},
};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeSet,
    fs,
    io::{self, Write as _},
    path::{Path, PathBuf},
    time::Duration,
};

/// Version of the layout of the file.
pub const LIST_FILE_VERSION: u32 = 1;
const KIND: &str = "quarry-revocations";

/// Why a list cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ListError {
    /// The file cannot be read or written.
    #[error("the revocation list {}: {source}", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The file is no revocation list of this cluster.
    #[error("the revocation list {}: {field} must be {expected}, found {found}", path.display())]
    Field {
        /// Which file.
        path: PathBuf,
        /// Which field.
        field: &'static str,
        /// What it must be.
        expected: String,
        /// What it is.
        found: String,
    },
}

/// A list as its file keeps it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct List {
    /// The cluster that it is for.
    pub cluster: ClusterUuid,
    /// What the root signed.
    pub signed: Signed<Revocations>,
}

/// The list and its serials for people; what counts is what is signed.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ListFile {
    version: u32,
    kind: String,
    cluster: String,
    number: u64,
    /// As text: TOML has no numbers of 64 bits without a sign.
    serials: Vec<String>,
    signed: String,
}

impl List {
    /// The list that follows `before`, with further serials. The first one has number 1.
    #[must_use]
    pub fn after(before: Option<&Self>, root: &Root, serials: impl IntoIterator<Item = CertificateSerial>) -> Self {
        let (number, mut all) = match before {
            Some(list) => (list.signed.statement.number, list.signed.statement.serials.clone()),
            None => (0, BTreeSet::new()),
        };
        all.extend(serials);
        let signed = root.key.sign_as_root(root.cluster, Revocations { number: number + 1, serials: all });
        Self { cluster: root.cluster, signed }
    }

    /// Reads the file of a list; `None` if there is no such file. Checks that `root` signed it for `cluster`.
    ///
    /// # Errors
    /// [`ListError`].
    pub fn read(path: &Path, cluster: ClusterUuid, root: PublicKey) -> Result<Option<Self>, ListError> {
        let field = |field, expected: &str, found: String| ListError::Field {
            path: path.to_owned(),
            field,
            expected: expected.to_owned(),
            found,
        };
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(ListError::Io { path: path.to_owned(), source }),
        };
        let file: ListFile = toml::from_str(&text)
            .map_err(|wrong| field("layout", "that of a revocation list", wrong.message().to_owned()))?;
        if file.kind != KIND {
            return Err(field("kind", KIND, file.kind));
        }
        if file.version != LIST_FILE_VERSION {
            return Err(field("version", &LIST_FILE_VERSION.to_string(), file.version.to_string()));
        }
        if file.cluster != cluster.to_string() {
            return Err(field("cluster", &cluster.to_string(), file.cluster));
        }
        let bytes = hex::decode(&file.signed).unwrap_or_default();
        let signed: Signed<Revocations> = Signed::decode(&bytes)
            .map_err(|wrong| field("signed", "a signed revocation list in hex", wrong.to_string()))?;
        let root_key = root.verifying().ok_or_else(|| field("root", "a usable public key", root.to_string()))?;
        if !signed.is_signed_by(cluster, &root_key) {
            return Err(field("signed", &format!("signed by root {root}"), "another signature".to_owned()));
        }
        let said = &signed.statement;
        if said.number != file.number || texts(&said.serials) != file.serials {
            let found = format!("list {} of {} serials", file.number, file.serials.len());
            return Err(field("number and serials", &format!("those of list {} as signed", said.number), found));
        }
        Ok(Some(Self { cluster, signed }))
    }

    /// Writes the file, in place of what is there, whole or not at all.
    ///
    /// # Errors
    /// [`ListError::Io`].
    pub fn write(&self, path: &Path) -> Result<(), ListError> {
        let io = |source| ListError::Io { path: path.to_owned(), source };
        let said = &self.signed.statement;
        let file = ListFile {
            version: LIST_FILE_VERSION,
            kind: KIND.to_owned(),
            cluster: self.cluster.to_string(),
            number: said.number,
            serials: texts(&said.serials),
            signed: hex::encode(self.signed.encode()),
        };
        let text = toml::to_string(&file).expect("texts and small numbers are always TOML");
        let aside = path.with_added_extension("new");
        let mut out = fs::File::create(&aside).map_err(io)?;
        out.write_all(text.as_bytes()).and_then(|()| out.sync_all()).map_err(io)?;
        fs::rename(&aside, path).map_err(io)?;
        // A number that was given to a cluster must not be given again.
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
        fs::File::open(folder).and_then(|folder| folder.sync_all()).map_err(io)
    }
}

fn texts(serials: &BTreeSet<CertificateSerial>) -> Vec<String> {
    serials.iter().map(|serial| serial.0.to_string()).collect()
}

/// Tells the cluster, asking its meta nodes in turn until the leader of the directory has taken the list. Telling it again changes nothing.
///
/// # Errors
/// [`CallError`]: at once if time does not change it, else at the deadline the last that a node said.
pub async fn apply(
    trust: &Trust,
    metas: &[String],
    list: &Signed<Revocations>,
    deadline: Duration,
) -> Result<v1::ApplyRevocationsReply, CallError> {
    let asked = v1::ApplyRevocationsRequest { list: list.encode().into() };
    at_directory(trust, metas, deadline, |calls, patience| {
        let asked = request(asked.clone(), patience);
        async move { v1::admin_client::AdminClient::new(calls).apply_revocations(asked).await }
    })
    .await
}

/// A certificate that the directory has, and whether it is void.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Admitted {
    /// What the root says.
    pub certificate: Certificate,
    /// The newest revocation list names it.
    pub revoked: bool,
}

/// The certificates in an answer of a meta node that was asked for everything, by serial, and the number of its revocation list. Signatures are
/// not looked at: nothing is believed because of them.
#[must_use]
pub fn certificates(changes: &v1::Changes) -> (Vec<Admitted>, u64) {
    let list = Signed::<Revocations>::decode(&changes.revocations).ok().map(|signed| signed.statement);
    let list = list.unwrap_or_default();
    let decode = |bytes: &bytes::Bytes| Signed::<Certificate>::decode(bytes).ok().map(|signed| signed.statement);
    let admitted = |certificate: Certificate| {
        let revoked = list.serials.contains(&certificate.serial);
        Admitted { certificate, revoked }
    };
    let mut all: Vec<Admitted> = changes.certificates.iter().filter_map(decode).map(admitted).collect();
    all.sort_by_key(|it| it.certificate.serial);
    (all, list.number)
}

/// Data nodes that announced themselves and have no certificate that `list` does not name.
#[must_use]
pub fn silenced(changes: &v1::Changes, list: &Revocations) -> Vec<u64> {
    let (certificates, _) = certificates(changes);
    let holds = |node: u64| {
        certificates.iter().any(|it| {
            let said = &it.certificate;
            said.node.0 == node && said.role == Role::DataNode && !list.serials.contains(&said.serial)
        })
    };
    changes.data_nodes.iter().map(|it| it.node).filter(|node| !holds(*node)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_only_grows_and_survives_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("revocations.toml");
        let root = Root::generate().unwrap();
        let read = || List::read(&path, root.cluster, root.public());
        assert_eq!(read().unwrap(), None);
        let first = List::after(None, &root, [CertificateSerial(7)]);
        first.write(&path).unwrap();
        assert_eq!(read().unwrap().unwrap(), first);
        let second = List::after(Some(&first), &root, [CertificateSerial(u64::MAX), CertificateSerial(7)]);
        second.write(&path).unwrap();
        let said = read().unwrap().unwrap().signed.statement;
        assert_eq!(
            said,
            Revocations { number: 2, serials: [CertificateSerial(7), CertificateSerial(u64::MAX)].into() }
        );
    }

    #[test]
    fn a_list_of_another_root_or_cluster_or_with_changed_words_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("revocations.toml");
        let (root, other) = (Root::generate().unwrap(), Root::generate().unwrap());
        List::after(None, &root, [CertificateSerial(7)]).write(&path).unwrap();
        let refused = |cluster, key| match List::read(&path, cluster, key) {
            Err(ListError::Field { field, .. }) => field,
            other => panic!("{other:?}"),
        };
        assert_eq!(refused(other.cluster, root.public()), "cluster");
        assert_eq!(refused(root.cluster, other.public()), "signed");
        let text = fs::read_to_string(&path).unwrap();
        for (from, to, field) in [
            ("number = 1", "number = 2", "number and serials"),
            ("serials = [\"7\"]", "serials = [\"8\"]", "number and serials"),
            ("version = 1", "version = 2", "version"),
            (KIND, "quarry-root-key", "kind"),
            ("number = 1", "count = 1", "layout"),
        ] {
            assert!(text.contains(from), "{text}");
            fs::write(&path, text.replace(from, to)).unwrap();
            assert_eq!(refused(root.cluster, root.public()), field);
        }
    }
}
