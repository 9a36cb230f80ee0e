//! `raft-admin member`: meta nodes come, vote, go and take each other's places.

use crate::{Ask, report::table};
use bytes::Bytes;
use clap::{Args, Subcommand};
use quarry::{
    admin,
    exit::{Code, Failure, Format},
    identity::Identity,
    members, named, stderr,
    stdout::line,
};
use quarry_proto::{
    refusal::Refusal,
    v1::{self, change_members_request::Kind, node_refused::Reason},
};
use quarry_trust::Trust;
use quarry_wire::certificate::Role;
use serde_json::{Value, json};
use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};
use tokio::time::{Instant, sleep};

/// Between two looks at how far a change is.
const LOOK_EVERY: Duration = Duration::from_millis(200);

#[derive(Subcommand, Debug)]
pub(crate) enum MemberCommand {
    /// The meta nodes: who votes, where they are, and whether a change is under way.
    List(Ask),
    /// How far the change under way is, group by group.
    Status(Ask),
    /// Send all logs to a new node, which does not vote yet. It runs already, with an empty folder and a key of its own.
    Add {
        /// Its number, which no node had before.
        #[arg(value_parser = number_of_node())]
        node: u64,
        /// host:port where it listens.
        address: String,
        /// Its key file, to take the certificate from there; without it the node shows its own, which the root must have signed.
        #[arg(long, value_name = "FILE")]
        certificate: Option<PathBuf>,
        #[command(flatten)]
        change: ChangeArgs,
    },
    /// Let a node vote that was added before and has caught up.
    Promote {
        /// The node.
        #[arg(value_parser = number_of_node())]
        node: u64,
        #[command(flatten)]
        change: ChangeArgs,
    },
    /// End the membership of a node, dead or alive. Its number is never used again. Refused if the others would be no majority.
    Remove {
        /// The node.
        #[arg(value_parser = number_of_node())]
        node: u64,
        #[command(flatten)]
        change: ChangeArgs,
    },
    /// Let a new node take the vote of another, which may be dead.
    Replace {
        /// The node that leaves.
        #[arg(value_parser = number_of_node())]
        old: u64,
        /// The number of the new one.
        #[arg(value_parser = number_of_node())]
        new: u64,
        /// host:port where the new one listens.
        address: String,
        /// The key file of the new one, to take the certificate from there.
        #[arg(long, value_name = "FILE")]
        certificate: Option<PathBuf>,
        #[command(flatten)]
        change: ChangeArgs,
    },
    /// Give the change under way up; what it did stays. A removal cannot be cancelled.
    Cancel(Ask),
}

/// A node is numbered from 1.
fn number_of_node() -> clap::builder::RangedU64ValueParser {
    clap::value_parser!(u64).range(1..)
}

#[derive(Args, Debug)]
pub(crate) struct ChangeArgs {
    /// How long to wait for the end of the change, and to ask until it begins, at least as long as --timeout; it goes on if that is not enough, and
    /// the same command waits again.
    #[arg(long, value_name = "SPAN", default_value = "60s", value_parser = humantime::parse_duration)]
    wait: Duration,
    #[command(flatten)]
    ask: Ask,
}

pub(crate) async fn run(command: MemberCommand, format: Format) -> Result<ExitCode, Failure> {
    let asked = |kind: Kind, node: u64| v1::ChangeMembersRequest { kind: kind.into(), node, ..Default::default() };
    match command {
        MemberCommand::List(ask) => list(&ask, format).await,
        MemberCommand::Status(ask) => status(&ask, format).await,
        MemberCommand::Add { node, address, certificate, change: args } => {
            let certificate = read(certificate, &args.ask)?;
            change(v1::ChangeMembersRequest { address, certificate, ..asked(Kind::Add, node) }, &args, format).await
        }
        MemberCommand::Promote { node, change: args } => change(asked(Kind::Promote, node), &args, format).await,
        MemberCommand::Remove { node, change: args } => change(asked(Kind::Remove, node), &args, format).await,
        MemberCommand::Replace { old, new, address, certificate, change: args } => {
            let certificate = read(certificate, &args.ask)?;
            let asked = v1::ChangeMembersRequest { address, certificate, old, ..asked(Kind::Replace, new) };
            change(asked, &args, format).await
        }
        MemberCommand::Cancel(ask) => {
            let (metas, trust) = crate::whom(&ask)?;
            let (metas, _) = admin::status_of_present(&trust, &metas, admin::LOOK.min(ask.timeout)).await;
            let reply = members::change(&trust, &metas, &asked(Kind::Cancel, 0), ask.timeout).await.map_err(failure)?;
            say(format, "cancelled", &number(reply.number), "what it did stays: see raft-admin member list")
        }
    }
}

/// The certificate in a key file; empty if none is named.
fn read(file: Option<PathBuf>, ask: &Ask) -> Result<Bytes, Failure> {
    let Some(file) = file else { return Ok(Bytes::new()) };
    let cluster = named::cluster(&ask.cluster, ask.credentials.as_deref())?;
    let identity = Identity::read(&file, Role::Meta, cluster.uuid, cluster.root).map_err(Failure::of)?;
    Ok(identity.certificate.encode().into())
}

fn failure(wrong: admin::CallError) -> Failure {
    let hint = match wrong.refusal() {
        Some(Refusal::NodeRefused(it)) => match it.reason() {
            Reason::UnderWay => Some("raft-admin member status tells how far it is"),
            Reason::Silent => {
                Some("start it first: quarry meta with the same cluster file, a key of its own, an empty folder")
            }
            Reason::Behind => Some("--wait waits until it has caught up"),
            Reason::NoQuorum => {
                Some("start the silent nodes again, or replace them one by one: raft-admin member replace")
            }
            _ => None,
        },
        _ => None,
    };
    let failure = Failure::from(wrong);
    match hint {
        Some(hint) => failure.hint(hint),
        None => failure,
    }
}

fn number(it: Option<v1::Ordinal>) -> String {
    it.map_or_else(|| "none".to_owned(), |it| format!("{}.{}", it.generation, it.number))
}

fn say(format: Format, state: &str, change: &str, text: &str) -> Result<ExitCode, Failure> {
    line(match format {
        Format::Json => json!({ "change": change, "state": state }).to_string(),
        Format::Text => format!("change {change} is {state}: {text}"),
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Begins the change and waits for its end, telling on stderr how far it is.
async fn change(asked: v1::ChangeMembersRequest, args: &ChangeArgs, format: Format) -> Result<ExitCode, Failure> {
    let (file, trust) = crate::whom(&args.ask)?;
    let start = Instant::now();
    let until = start + args.wait;
    // It is asked once at least, whatever may be waited for.
    let begin = start + args.wait.max(args.ask.timeout);
    let left = |until: Instant| until.saturating_duration_since(Instant::now());
    let (metas, answers) = admin::status_of_present(&trust, &file, admin::LOOK.min(args.ask.timeout)).await;
    admin::unless_forbidden(&answers)?;
    if answers.iter().all(Result::is_err) {
        // Those that are only slow have all the time that one question has.
        admin::is_heard(&admin::status_all(&trust, &metas, args.ask.timeout).await)?;
    }
    let mut said = String::new();
    let begun = loop {
        match members::change(&trust, &metas, &asked, args.ask.timeout.min(left(begin))).await {
            Ok(reply) => break reply.number,
            // What was removed stays removed: the same command again changes nothing.
            Err(admin::CallError::Refused { refusal, .. })
                if asked.kind() == Kind::Remove && is(&refusal, Reason::Retired) =>
            {
                return say(format, "done", "of before", &refusal.to_string());
            }
            Err(admin::CallError::Refused { refusal, .. })
                if is(&refusal, Reason::Behind) && left(begin) > LOOK_EVERY =>
            {
                tell_once(&mut said, refusal.to_string());
                sleep(LOOK_EVERY).await;
            }
            // Whoever led the directory is gone, or too busy. What was asked may have begun: the same again is the same change.
            Err(wrong) if wrong.is_passing() && left(begin) > LOOK_EVERY => {
                tell_once(&mut said, format!("asked again: {wrong}"));
                sleep(LOOK_EVERY).await;
            }
            Err(wrong) => return Err(failure(wrong)),
        }
    };
    let mut told = String::new();
    loop {
        let (_, answers) = admin::status_of_present(&trust, &metas, admin::LOOK).await;
        let heard: Vec<&v1::StatusReply> = answers.iter().filter_map(|answer| answer.as_ref().ok()).collect();
        if let Some(done) = heard.iter().filter_map(|it| it.change_done.as_ref()).find(|it| it.number == begun) {
            return say(format, "done", &number(begun), &done.what);
        }
        let under_way = judge(&heard).and_then(|it| it.change_under_way.as_ref()).filter(|it| it.number == begun);
        if let Some(progress) = under_way.map(progress).filter(|progress| *progress != told) {
            stderr::line(format_args!("{progress}"));
            told = progress;
        }
        if Instant::now() >= until {
            let what = format!("change {} is not done within {}", number(begun), humantime::format_duration(args.wait));
            let hint =
                "it goes on by itself; the same command waits for it, raft-admin member status tells how far it is";
            return Err(Failure::new(
                Code::Unavailable,
                if told.is_empty() { what } else { format!("{what}: {told}") },
            )
            .hint(hint));
        }
        sleep(LOOK_EVERY).await;
    }
}

/// Tells on stderr what was not told before.
fn tell_once(said: &mut String, text: String) {
    if *said != text {
        stderr::line(&text);
        *said = text;
    }
}

fn is(refusal: &Refusal, reason: Reason) -> bool {
    matches!(refusal, Refusal::NodeRefused(it) if it.reason() == reason)
}

/// The answer of the directory's leader, else anyone's.
fn judge<'a>(heard: &[&'a v1::StatusReply]) -> Option<&'a v1::StatusReply> {
    let leader = admin::leader_of(heard.iter().copied(), admin::DIRECTORY);
    heard.iter().find(|it| Some(it.node) == leader.map(|node| node.0)).or_else(|| heard.first()).copied()
}

fn progress(change: &v1::MemberChange) -> String {
    let done = change.groups.iter().filter(|group| group.done).count();
    let next = change.groups.iter().find(|group| !group.done);
    let next = next.map_or_else(String::new, |it| format!("; group {}: {}", it.group, it.next));
    format!("{}: {done} of {} groups{next}", change.what, change.groups.len())
}

/// What is known of one meta node.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Row {
    node: u64,
    address: String,
    answers: bool,
    /// In how many groups it votes, and in how many it only learns.
    votes: usize,
    learns: usize,
    leads: usize,
}

/// One row for each node that the cluster has, by number.
fn rows(answers: &[Result<v1::StatusReply, admin::CallError>]) -> Vec<Row> {
    let heard: Vec<&v1::StatusReply> = answers.iter().filter_map(|answer| answer.as_ref().ok()).collect();
    let metas: BTreeMap<u64, &str> =
        heard.iter().flat_map(|reply| &reply.metas).map(|meta| (meta.node, meta.address.as_str())).collect();
    let retired: BTreeSet<u64> = heard.iter().flat_map(|reply| reply.retired.iter().copied()).collect();
    let groups: BTreeSet<u32> = heard.iter().flat_map(|reply| reply.groups.iter().map(|it| it.group)).collect();
    // Of each group the view of its leader counts, else anyone's.
    let views: Vec<(&v1::GroupStatus, Option<u64>)> = groups
        .iter()
        .filter_map(|group| {
            let leader = admin::leader_of(heard.iter().copied(), *group).map(|node| node.0);
            let of = |reply: &&&v1::StatusReply| leader.is_none_or(|leader| reply.node == leader);
            let view = heard.iter().find(of)?.groups.iter().find(|it| it.group == *group)?;
            Some((view, leader))
        })
        .collect();
    let named: BTreeSet<u64> =
        views.iter().flat_map(|(view, _)| view.members.iter().copied()).chain(metas.keys().copied()).collect();
    let row = |node: u64| {
        let is_member = |view: &v1::GroupStatus| view.members.contains(&node);
        let learns = views.iter().filter(|(view, _)| view.learners.contains(&node)).count();
        Row {
            node,
            address: metas.get(&node).copied().unwrap_or_default().to_owned(),
            answers: heard.iter().any(|reply| reply.node == node),
            votes: views.iter().filter(|(view, _)| is_member(view)).count() - learns,
            learns,
            leads: views.iter().filter(|(_, leader)| *leader == Some(node)).count(),
        }
    };
    let stays = |row: &Row| row.votes + row.learns > 0 || !retired.contains(&row.node);
    named.into_iter().map(row).filter(stays).collect()
}

impl Row {
    fn role(&self, groups: usize) -> &'static str {
        match (self.votes, self.learns) {
            (votes, 0) if votes == groups => "voter",
            (0, learns) if learns == groups => "learner",
            (0, 0) => "no member",
            _ => "changing",
        }
    }
}

async fn heard(ask: &Ask) -> Result<(Trust, Vec<Result<v1::StatusReply, admin::CallError>>), Failure> {
    let (metas, trust) = crate::whom(ask)?;
    let (_, answers) = admin::status_of_present(&trust, &metas, ask.timeout).await;
    admin::unless_forbidden(&answers)?;
    admin::is_heard(&answers)?;
    Ok((trust, answers))
}

async fn list(ask: &Ask, format: Format) -> Result<ExitCode, Failure> {
    let (_, answers) = heard(ask).await?;
    let replies: Vec<&v1::StatusReply> = answers.iter().filter_map(|answer| answer.as_ref().ok()).collect();
    let groups = replies.iter().map(|reply| reply.groups.len()).max().unwrap_or(0);
    let judge = judge(&replies);
    let under_way = judge.and_then(|it| it.change_under_way.as_ref());
    let retired: Vec<u64> = judge.map(|it| it.retired.clone()).unwrap_or_default();
    let rows = rows(&answers);
    line(match format {
        Format::Json => {
            let row = |row: &Row| {
                json!({ "node": row.node, "address": row.address, "role": row.role(groups), "answers": row.answers,
                    "votes": row.votes, "learns": row.learns, "leads": row.leads })
            };
            json!({ "members": rows.iter().map(row).collect::<Value>(), "groups": groups, "retired": retired,
                "change": under_way.map(as_json) })
            .to_string()
        }
        Format::Text => {
            let retired = match &retired[..] {
                [] => String::new(),
                retired => {
                    format!("\nnever used again: {}", retired.iter().map(u64::to_string).collect::<Vec<_>>().join(", "))
                }
            };
            let mut shown = table(&["meta node", "address", "role", "leads", "answers"]);
            for row in &rows {
                shown.add_row(vec![
                    row.node.to_string(),
                    row.address.clone(),
                    row.role(groups).to_owned(),
                    format!("{} of {groups} groups", row.leads),
                    row.answers.to_string(),
                ]);
            }
            let change = under_way.map_or_else(|| "no change is under way".to_owned(), progress);
            format!("{shown}\n{change}{retired}")
        }
    })?;
    Ok(ExitCode::SUCCESS)
}

fn as_json(change: &v1::MemberChange) -> Value {
    let group = |it: &v1::MemberProgress| json!({ "group": it.group, "done": it.done, "next": it.next });
    json!({ "number": number(change.number), "what": change.what,
        "groups": change.groups.iter().map(group).collect::<Value>() })
}

async fn status(ask: &Ask, format: Format) -> Result<ExitCode, Failure> {
    let (_, answers) = heard(ask).await?;
    let replies: Vec<&v1::StatusReply> = answers.iter().filter_map(|answer| answer.as_ref().ok()).collect();
    let judge = judge(&replies);
    let (under_way, done) =
        (judge.and_then(|it| it.change_under_way.as_ref()), judge.and_then(|it| it.change_done.as_ref()));
    line(match format {
        Format::Json => json!({ "under_way": under_way.map(as_json), "done": done.map(as_json) }).to_string(),
        Format::Text => match (under_way, done) {
            (Some(change), _) => {
                let mut shown = format!("change {}: {}", number(change.number), change.what);
                for it in &change.groups {
                    shown.push_str(&format!("\n  group {}: {}", it.group, it.next));
                }
                shown
            }
            (None, Some(done)) => {
                format!("no change is under way; the last, {}, is done: {}", number(done.number), done.what)
            }
            (None, None) => "no change is under way".to_owned(),
        },
    })?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(node: u64, leader: u64, members: &[u64], learners: &[u64]) -> Result<v1::StatusReply, admin::CallError> {
        let role = if node == leader { "leader" } else { "follower" };
        let group = |group| v1::GroupStatus {
            group,
            role: role.to_owned(),
            term: 1,
            leader,
            members: members.to_vec(),
            learners: learners.to_vec(),
            ..Default::default()
        };
        let meta = |node: &u64| v1::MetaInfo { node: *node, address: format!("h:{node}") };
        let metas = members.iter().map(meta).collect();
        Ok(v1::StatusReply { node, groups: vec![group(0), group(1)], metas, retired: vec![9], ..Default::default() })
    }

    #[test]
    fn the_leaders_view_of_its_group_is_what_is_listed() {
        // The second node is behind: it has not heard of the fourth.
        let answers = [reply(2, 1, &[1, 2, 3], &[]), reply(1, 1, &[1, 2, 3, 4], &[4])];
        let rows = rows(&answers);
        let roles: Vec<(u64, &str, bool)> = rows.iter().map(|row| (row.node, row.role(2), row.answers)).collect();
        assert_eq!(roles, [(1, "voter", true), (2, "voter", true), (3, "voter", false), (4, "learner", false)]);
        assert_eq!((rows[0].leads, rows[3].address.as_str()), (2, "h:4"));
    }

    #[test]
    fn progress_names_the_first_group_that_is_not_done() {
        let group = |group, done| v1::MemberProgress { group, done, next: "wait".to_owned() };
        let change = v1::MemberChange {
            what: "add node-4".to_owned(),
            groups: vec![group(0, true), group(1, false), group(2, false)],
            ..Default::default()
        };
        assert_eq!(progress(&change), "add node-4: 1 of 3 groups; group 1: wait");
    }
}
