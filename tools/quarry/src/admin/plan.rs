//! What a new cluster is made of, and the file that says so.

use quarry_wire::{
    certificate::Certificate,
    ids::ClusterUuid,
    signed::{PublicKey, Signed},
};
use serde::{Deserialize, Serialize};
use std::{
    io,
    path::{Path, PathBuf},
};

/// What is told to a new cluster: who it is and which meta nodes it has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BootstrapPlan {
    /// The cluster.
    pub cluster: ClusterUuid,
    /// Its root's public key.
    pub root: PublicKey,
    /// How many shards it has for ever.
    pub shards: u32,
    /// Its first meta nodes.
    pub metas: Vec<PlannedMeta>,
}

/// One meta node of a new cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedMeta {
    /// Its id.
    pub node: u64,
    /// host:port of its gRPC server.
    pub address: String,
    /// Its certificate.
    pub certificate: Signed<Certificate>,
}

/// Version of the layout of plan files.
pub const PLAN_VERSION: u32 = 1;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PlanFile {
    version: u32,
    cluster: String,
    root: String,
    shards: u32,
    metas: Vec<PlanFileMeta>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PlanFileMeta {
    node: u64,
    address: String,
    certificate: String,
}

/// Why a plan file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// It cannot be read or written.
    #[error("the plan {}: {source}", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// It is not TOML of this layout.
    #[error("the plan {} cannot be understood: {why}", path.display())]
    Layout {
        /// Which file.
        path: PathBuf,
        /// What the parser says.
        why: String,
    },
    /// A field does not fit.
    #[error("the plan {}: {field} must be {expected}, found {found}", path.display())]
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

impl BootstrapPlan {
    /// Writes the plan as a file. Nothing in it is secret.
    ///
    /// # Errors
    /// [`PlanError::Io`].
    pub fn write(&self, path: &Path) -> Result<(), PlanError> {
        let meta = |meta: &PlannedMeta| PlanFileMeta {
            node: meta.node,
            address: meta.address.clone(),
            certificate: hex::encode(meta.certificate.encode()),
        };
        let file = PlanFile {
            version: PLAN_VERSION,
            cluster: self.cluster.to_string(),
            root: self.root.to_string(),
            shards: self.shards,
            metas: self.metas.iter().map(meta).collect(),
        };
        let text = toml::to_string(&file).expect("strings and numbers are always TOML");
        std::fs::write(path, text).map_err(|source| PlanError::Io { path: path.to_owned(), source })
    }

    /// Reads a plan.
    ///
    /// # Errors
    /// [`PlanError`], with the field.
    pub fn read(path: &Path) -> Result<Self, PlanError> {
        let io = |source| PlanError::Io { path: path.to_owned(), source };
        let text = std::fs::read_to_string(path).map_err(io)?;
        let layout = |why: toml::de::Error| PlanError::Layout { path: path.to_owned(), why: why.to_string() };
        let file: PlanFile = toml::from_str(&text).map_err(layout)?;
        let field = |field, expected: &str, found: String| PlanError::Field {
            path: path.to_owned(),
            field,
            expected: expected.to_owned(),
            found,
        };
        if file.version != PLAN_VERSION {
            return Err(field("version", &PLAN_VERSION.to_string(), file.version.to_string()));
        }
        if file.metas.is_empty() {
            return Err(field("metas", "at least one meta node", "none".to_owned()));
        }
        let mut metas = Vec::new();
        for meta in file.metas {
            let bytes = hex::decode(&meta.certificate).unwrap_or_default();
            let certificate = Signed::decode(&bytes)
                .map_err(|wrong| field("certificate", "a signed certificate in hex", wrong.to_string()))?;
            metas.push(PlannedMeta { node: meta.node, address: meta.address, certificate });
        }
        let wrong_uuid = |_| field("cluster", "32 hex digits", file.cluster.clone());
        let wrong_root = |_| field("root", "64 hex digits", file.root.clone());
        Ok(Self {
            cluster: file.cluster.parse().map_err(wrong_uuid)?,
            root: file.root.parse().map_err(wrong_root)?,
            shards: file.shards,
            metas,
        })
    }
}
