//! The command line: names, flags and what they default to. Decides nothing about clusters.

use crate::{
    bench::{BenchArgs, target::TargetArgs},
    doctor::DoctorArgs,
    exit::{CODES_HELP, Format},
    size,
};
use clap::{Args, Parser, Subcommand, ValueEnum};
use quarry::{
    build::VERSION,
    credentials::{client_role, node_role},
};
use quarry_wire::certificate::Role;
use std::{ffi::OsString, path::PathBuf};

/// What the help ends with, after the exit codes.
const ENVIRONMENT: &str = "\
Environment:
  QUARRY_CLUSTER         cluster file or quarry:// URL of the client commands
  QUARRY_CREDENTIALS     credentials of the client commands, instead of those that the cluster file names
  QUARRY_NAMESPACE       namespace of put, get, cat, stat, exists, ls and rm
  QUARRY_LOG             what is logged to stderr, for example info or quarry_meta=debug; without it
                         daemons log info and commands nothing
  QUARRY_LOG_FORMAT      text or json
  QUARRY_SECTION__KEY    sets section.key of the configuration of meta and datanode";

fn after_help() -> String {
    format!("{CODES_HELP}\n\n{ENVIRONMENT}")
}

/// Quarry: values in remote memory, written and read by one-sided RMA.
#[derive(Parser, Debug)]
#[command(name = "quarry", version = VERSION, after_help = after_help(), arg_required_else_help = true)]
pub(crate) struct Cli {
    /// Print the build id and end.
    #[arg(long, hide = true)]
    pub(crate) build_id: bool,
    /// How log lines on stderr look; by default as QUARRY_LOG_FORMAT says, else text.
    #[arg(long, value_enum, global = true)]
    pub(crate) log_format: Option<LogFormat>,
    /// What is printed, errors too.
    #[arg(long, short, value_enum, global = true, default_value_t)]
    pub(crate) output: Format,
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
}

#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Run a meta node.
    Meta(DaemonArgs),
    /// Run a data node.
    Datanode(DaemonArgs),
    /// Run a cluster on this host, in one folder, until Ctrl-C.
    Up(UpArgs),
    /// Make the root key of a cluster, and the keys and credentials of its nodes and clients.
    #[command(subcommand)]
    Keys(KeysCommand),
    /// Make and list namespaces.
    #[command(subcommand)]
    Namespace(NamespaceCommand),
    /// Write values under new keys; prints their versions.
    Put(PutArgs),
    /// Read a value to standard output, or values into files.
    Get(GetArgs),
    /// Write values to standard output, one after the other.
    Cat(CatArgs),
    /// Show what is known of values: version, size, checksum, where the copies are.
    Stat(StatArgs),
    /// Print how many of the keys exist before the first that does not; not found unless all do.
    Exists(ExistsArgs),
    /// List keys in the order of their bytes.
    Ls(ListArgs),
    /// Delete keys.
    Rm(RmArgs),
    /// Say what this machine lacks, and how to mend it.
    Doctor(DoctorArgs),
    /// Show all processes of a cluster in one table, refreshed every second.
    Top(TopArgs),
    /// Measure a cluster of this machine's own, against what the machine gives.
    Bench(BenchArgs),
    /// The raw target of the bench, in a process of its own.
    #[command(hide = true)]
    BenchTarget(TargetArgs),
    /// Start a cluster, show that it works, also without its leader and without a data node, and stop it.
    Demo(DemoArgs),
    /// The reading half of the demo, in a process of its own.
    #[command(hide = true)]
    DemoVerify(VerifyArgs),
}

#[derive(Args, Debug)]
pub(crate) struct RevokeArgs {
    /// The root's key file.
    #[arg(long, value_name = "FILE")]
    pub(crate) root: PathBuf,
    /// The revocation list; made if it is not there. Keep it: the next list must have all serials of this one.
    #[arg(long, value_name = "FILE")]
    pub(crate) list: PathBuf,
    /// Serials of the certificates, as raft-admin certificate list shows them.
    #[arg(value_name = "SERIAL", required = true, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) serials: Vec<u64>,
}

#[derive(Args, Debug)]
pub(crate) struct TopArgs {
    /// Cluster file, or quarry://host:port,host:port?uuid=..&root=..
    #[arg(long, value_name = "FILE|URL", env = "QUARRY_CLUSTER")]
    pub(crate) cluster: String,
    /// Credentials of an administrator, instead of those that the cluster file names.
    #[arg(long, value_name = "FILE", env = "QUARRY_CREDENTIALS")]
    pub(crate) credentials: Option<PathBuf>,
    /// Print one table, of one second, and end.
    #[arg(long)]
    pub(crate) once: bool,
}

/// How log lines look.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LogFormat {
    /// For people.
    Text,
    /// One JSON object per line.
    Json,
}

#[derive(Args, Debug)]
pub(crate) struct DaemonArgs {
    /// Configuration file.
    #[arg(long, short, value_name = "FILE")]
    pub(crate) config: PathBuf,
    /// Check the configuration and the key file, and end.
    #[arg(long)]
    pub(crate) check_config: bool,
    /// Where to listen: node.listen.
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) listen: Option<String>,
    /// What others connect to: node.advertise.
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) advertise: Option<String>,
    /// Where to show metrics, health and status over HTTP: admin.listen.
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) admin_listen: Option<String>,
    /// Folder for what is kept: node.data_dir.
    #[arg(long, value_name = "DIR")]
    pub(crate) data_dir: Option<PathBuf>,
    /// Cluster file: node.cluster.
    #[arg(long, value_name = "FILE")]
    pub(crate) cluster: Option<PathBuf>,
    /// Key file: node.key.
    #[arg(long, value_name = "FILE")]
    pub(crate) key: Option<PathBuf>,
    /// Credentials for connections: tls.credentials.
    #[arg(long, value_name = "FILE")]
    pub(crate) credentials: Option<PathBuf>,
    /// Any setting; may be repeated.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    pub(crate) settings: Vec<String>,
}

#[derive(Args, Debug)]
pub(crate) struct UpArgs {
    /// Folder of the cluster; made if absent, opened again if it holds a cluster.
    #[arg(long, value_name = "DIR", default_value = "quarry-data")]
    pub(crate) dir: PathBuf,
    /// Meta nodes of a new cluster [default: 3]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=9))]
    pub(crate) metas: Option<u32>,
    /// Data nodes of a new cluster [default: 2]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) data_nodes: Option<u32>,
    /// Memory that each data node of a new cluster lends.
    #[arg(long, value_name = "BYTES", default_value = "256MiB", value_parser = region)]
    pub(crate) region: u64,
    /// A new cluster runs without TLS: everyone on this host may do everything.
    #[arg(long)]
    pub(crate) plaintext: bool,
    /// File to write the path of the cluster file into when the cluster is ready; removed at the end.
    #[arg(long, value_name = "FILE")]
    pub(crate) ready_file: Option<PathBuf>,
}

/// For how long credentials are believed.
#[derive(Args, Debug)]
pub(crate) struct Lasting {
    /// How many days.
    #[arg(long, default_value_t = 365, value_parser = clap::value_parser!(u32).range(1..=36_500))]
    pub(crate) days: u32,
}

#[derive(Subcommand, Debug)]
pub(crate) enum KeysCommand {
    /// Declare certificates of signing keys void: adds their serials to the revocation list. raft-admin revocation apply tells the cluster.
    Revoke(RevokeArgs),
    /// Make the root key of a new cluster; prints the cluster's id and the public key. Keep the file offline.
    Root {
        /// The file to make.
        #[arg(long, value_name = "FILE", default_value = "root.key")]
        out: PathBuf,
    },
    /// Make a node's signing key (node.key, unless there is one or --new-key) and credentials (tls.pem, new each time).
    Node {
        /// The root key.
        #[arg(long, value_name = "FILE")]
        root: PathBuf,
        /// meta or datanode.
        #[arg(long, value_parser = node_role)]
        role: Role,
        /// Its number; never used for another node.
        #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
        id: u64,
        /// A host name or IP address of it, for other tools than ours; may be repeated.
        #[arg(long = "address", value_name = "HOST")]
        addresses: Vec<String>,
        /// Its folder; made if absent.
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        /// Put a new signing key in the place of the one in node.key; raft-admin node rotate-key has a running data node take it.
        #[arg(long)]
        new_key: bool,
        #[command(flatten)]
        lasting: Lasting,
    },
    /// Make a client's credentials.
    Client {
        /// The root key.
        #[arg(long, value_name = "FILE")]
        root: PathBuf,
        /// writer (reads too), reader or admin; may be repeated.
        #[arg(long = "role", required = true, value_parser = client_role)]
        roles: Vec<Role>,
        /// What it is called, in logs and refusals. Writers of one name may end each other's grants.
        #[arg(long)]
        name: String,
        /// The file to make or to replace.
        #[arg(long, value_name = "FILE")]
        out: PathBuf,
        #[command(flatten)]
        lasting: Lasting,
    },
}

#[derive(Args, Debug)]
pub(crate) struct Connect {
    /// Cluster file, or quarry://host:port,host:port?uuid=..&root=..
    #[arg(long, value_name = "FILE|URL", env = "QUARRY_CLUSTER")]
    pub(crate) cluster: String,
    /// Credentials, instead of those that the cluster file names.
    #[arg(long, value_name = "FILE", env = "QUARRY_CREDENTIALS")]
    pub(crate) credentials: Option<PathBuf>,
    /// Deadline of the command, or of each of its operations if it works on many values.
    #[arg(long, value_name = "SPAN", default_value = "10s", value_parser = quarry::span::deadline)]
    pub(crate) timeout: std::time::Duration,
}

#[derive(Args, Debug)]
pub(crate) struct InNamespace {
    /// Namespace.
    #[arg(long, short, env = "QUARRY_NAMESPACE")]
    pub(crate) namespace: String,
    #[command(flatten)]
    pub(crate) connect: Connect,
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum ClassArg {
    /// May be evicted; gone when the memory of all its holders is.
    #[default]
    Cache,
    /// Acknowledged only when fsynced.
    Durable,
}

#[derive(Subcommand, Debug)]
pub(crate) enum NamespaceCommand {
    /// Make a namespace.
    Create {
        /// Its name.
        name: String,
        /// May its values be evicted?
        #[arg(long, value_enum, default_value_t)]
        class: ClassArg,
        /// Copies of each value.
        #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=3))]
        copies: u32,
        /// Least copies to accept a value with; by default 2, or 1 if there is one copy.
        #[arg(long, value_parser = clap::value_parser!(u32).range(1..=3))]
        least: Option<u32>,
        /// Most memory that its values have, all copies counted, such as 16GiB; at its limit a cache loses what was not read for longest.
        #[arg(long, value_name = "BYTES", value_parser = size::parse)]
        quota: Option<u64>,
        #[command(flatten)]
        connect: Connect,
    },
    /// List all namespaces.
    List {
        #[command(flatten)]
        connect: Connect,
    },
}

/// How keys are given and printed.
#[derive(Args, Debug)]
pub(crate) struct KeyForm {
    /// Keys are given and printed in hexadecimal.
    #[arg(long)]
    pub(crate) key_hex: bool,
}

/// What is said about work under way, on standard error.
#[derive(Args, Debug)]
pub(crate) struct Watch {
    /// Show no progress; it is shown only if standard error is a terminal.
    #[arg(long)]
    pub(crate) no_progress: bool,
    /// Say at the end how much was moved, and how fast.
    #[arg(long, short)]
    pub(crate) verbose: bool,
}

#[derive(Args, Debug)]
pub(crate) struct PutArgs {
    /// Key, 1 to 512 bytes.
    #[arg(required_unless_present = "files")]
    pub(crate) key: Option<OsString>,
    /// File with the value; - is standard input.
    #[arg(value_name = "FILE|-", default_value = "-", conflicts_with = "files")]
    pub(crate) file: PathBuf,
    /// Write many: each file under its name, or as KEY=FILE; a folder's files under their paths in it.
    #[arg(long, short, value_name = "[KEY=]FILE|DIR", num_args = 1.., conflicts_with = "key")]
    pub(crate) files: Vec<OsString>,
    /// What the keys of --files begin with.
    #[arg(long, value_name = "TEXT", requires = "files")]
    pub(crate) prefix: Option<OsString>,
    /// Write also if the key exists.
    #[arg(long)]
    pub(crate) replace: bool,
    #[command(flatten)]
    pub(crate) form: KeyForm,
    #[command(flatten)]
    pub(crate) watch: Watch,
    #[command(flatten)]
    pub(crate) namespace: InNamespace,
}

#[derive(Args, Debug)]
pub(crate) struct GetArgs {
    /// Keys; several need a folder to go to.
    #[arg(required = true, value_name = "KEY")]
    pub(crate) keys: Vec<OsString>,
    /// File, or folder for files named by their keys, to write into instead of standard output.
    #[arg(short = 'O', long, value_name = "FILE|DIR")]
    pub(crate) into: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) form: KeyForm,
    #[command(flatten)]
    pub(crate) watch: Watch,
    #[command(flatten)]
    pub(crate) namespace: InNamespace,
}

#[derive(Args, Debug)]
pub(crate) struct CatArgs {
    /// Keys.
    #[arg(required = true, value_name = "KEY")]
    pub(crate) keys: Vec<OsString>,
    #[command(flatten)]
    pub(crate) form: KeyForm,
    #[command(flatten)]
    pub(crate) watch: Watch,
    #[command(flatten)]
    pub(crate) namespace: InNamespace,
}

#[derive(Args, Debug)]
pub(crate) struct StatArgs {
    /// Keys.
    #[arg(required = true, value_name = "KEY")]
    pub(crate) keys: Vec<OsString>,
    #[command(flatten)]
    pub(crate) form: KeyForm,
    #[command(flatten)]
    pub(crate) namespace: InNamespace,
}

#[derive(Args, Debug)]
pub(crate) struct ExistsArgs {
    /// Keys, in the order in which they are needed.
    #[arg(required = true, value_name = "KEY")]
    pub(crate) keys: Vec<OsString>,
    #[command(flatten)]
    pub(crate) form: KeyForm,
    #[command(flatten)]
    pub(crate) namespace: InNamespace,
}

#[derive(Args, Debug)]
pub(crate) struct ListArgs {
    /// What the keys begin with; all keys without it.
    pub(crate) prefix: Option<OsString>,
    /// At most so many keys.
    #[arg(long, value_name = "NUMBER")]
    pub(crate) limit: Option<usize>,
    /// Begin behind this key.
    #[arg(long, value_name = "KEY")]
    pub(crate) after: Option<OsString>,
    /// Bytes, CRC-32C, copies and version before each key.
    #[arg(long, short)]
    pub(crate) long: bool,
    #[command(flatten)]
    pub(crate) form: KeyForm,
    #[command(flatten)]
    pub(crate) namespace: InNamespace,
}

#[derive(Args, Debug)]
pub(crate) struct RmArgs {
    /// Keys.
    #[arg(required = true, value_name = "KEY")]
    pub(crate) keys: Vec<OsString>,
    #[command(flatten)]
    pub(crate) form: KeyForm,
    #[command(flatten)]
    pub(crate) namespace: InNamespace,
}

#[derive(Args, Debug)]
pub(crate) struct DemoArgs {
    /// Blocks per round.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) blocks: u32,
    /// Bytes per block.
    #[arg(long, value_name = "BYTES", default_value = "64KiB", value_parser = size::parse)]
    pub(crate) size: u64,
    /// What the contents are made from.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Folder of the cluster; by default one in the folder for temporary files, removed at the end.
    #[arg(long, value_name = "DIR")]
    pub(crate) dir: Option<PathBuf>,
    /// Leave the cluster running, whole again.
    #[arg(long)]
    pub(crate) keep: bool,
}

#[derive(Args, Debug)]
pub(crate) struct VerifyArgs {
    #[arg(long)]
    pub(crate) blocks: u32,
    #[arg(long)]
    pub(crate) size: u64,
    #[arg(long)]
    pub(crate) seed: u64,
    /// Rounds to read; may be repeated.
    #[arg(long = "round", required = true)]
    pub(crate) rounds: Vec<u32>,
    #[command(flatten)]
    pub(crate) namespace: InNamespace,
}

/// The size of a region.
fn region(text: &str) -> Result<u64, String> {
    let bytes = size::parse(text)?;
    match quarry::config::wrong_region_bytes(bytes) {
        None => Ok(bytes),
        Some(expected) => Err(format!("expected {expected}, found {bytes}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{CommandFactory as _, error::ErrorKind};

    fn parse(line: &str) -> Result<Command, clap::Error> {
        let words = std::iter::once("quarry").chain(line.split_whitespace());
        Cli::try_parse_from(words).map(|cli| cli.command.unwrap())
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_demo_is_a_thousand_blocks_of_64_kib_unless_told_otherwise() {
        let Command::Demo(args) = parse("demo").unwrap() else { panic!("not the demo") };
        assert_eq!((args.blocks, args.size, args.keep), (1000, 65536, false));
        let Command::Demo(args) = parse("demo --blocks 10 --size 1MiB --keep").unwrap() else { panic!("not the demo") };
        assert_eq!((args.blocks, args.size, args.keep), (10, 1 << 20, true));
    }

    #[test]
    fn put_reads_standard_input_unless_a_file_is_named() {
        let line = "put k -n ns --cluster c.toml";
        let Command::Put(args) = parse(line).unwrap() else { panic!("not put") };
        assert_eq!((args.file, args.replace), (PathBuf::from("-"), false));
        assert_eq!((args.namespace.namespace.as_str(), args.namespace.connect.cluster.as_str()), ("ns", "c.toml"));
    }

    #[test]
    fn what_is_missing_or_impossible_is_wrong_usage() {
        let kind = |line| parse(line).unwrap_err().kind();
        assert_eq!(kind("rm -n ns --cluster c.toml"), ErrorKind::MissingRequiredArgument);
        assert_eq!(kind("get k --cluster c.toml"), ErrorKind::MissingRequiredArgument);
        assert_eq!(kind("get k -n ns"), ErrorKind::MissingRequiredArgument);
        assert_eq!(kind("meta"), ErrorKind::MissingRequiredArgument);
        assert_eq!(kind("up --metas 0"), ErrorKind::ValueValidation);
        assert_eq!(kind("demo --size 1parsec"), ErrorKind::ValueValidation);
        assert_eq!(kind("namespace create a --copies 4 --cluster c"), ErrorKind::ValueValidation);
        assert_eq!(kind("frobnicate"), ErrorKind::InvalidSubcommand);
    }

    #[test]
    fn every_command_prints_json_when_asked_before_or_behind_its_name() {
        let format = |line: &str| Cli::try_parse_from(line.split(' ')).unwrap().output;
        for line in
            ["quarry -o json doctor", "quarry doctor -o json", "quarry meta --config c -o json", "quarry up -o json"]
        {
            assert_eq!(format(line), Format::Json, "{line}");
        }
        assert_eq!(format("quarry doctor"), Format::Text);
        for command in Cli::command().get_subcommands() {
            assert!(command.get_arguments().all(|it| it.get_id() != "output"), "{} has its own", command.get_name());
        }
    }

    #[test]
    fn settings_may_be_repeated() {
        let Command::Meta(args) = parse("meta --config m.toml --set raft.shards=2 --set a.b=c").unwrap() else {
            panic!("not meta")
        };
        assert_eq!(args.settings, ["raft.shards=2", "a.b=c"]);
    }
}
