//! Bytes as they were first put on the wire and into slots: every later build reads them, and writes the same as long as their formats stand.
//! A format that changes keeps its recorded bytes here, read by whatever still reads them, and gets new ones beside them.

use crate::statements::{CLUSTER, DATA_SERIAL, GENERATION, META, META_SERIAL, batch, certificate, grant, key, record};
use quarry_wire::{
    certificate::Role,
    frame::{FrameHeader, FrameKind},
    ids::{NamespaceId, WriterId},
    key::Key,
    signed::{Signed, Statement},
    version::{HybridClock, Version},
};
use std::fmt::Debug;

/// A frame of format 1 with its payload, `recorded`, as it lies in a slot.
const FRAME: &str = "515259460100800004000000100000000800000000000000030000005c7a93010808080808080808000000000000000042001a1000000000000000009fb7dd066c617965722d372f626c6f636b2d31320000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000007265636f72646564";
/// Signed statements of November 2026.
const CERTIFICATE: &str = "0100000000000000000000000064000000000000000100000000000000018139770ea87d175f56a35466c34c7ecccb8d8a91b4ee37a25df60f5b8fc9b3949662b0bf16f5aaa752ca965e5e1a87e10cbf156e6fdc696b321ed56836e37be7a26676545201de70dbf6479f34530ed0b8b1b1ec65f68000206736bc9632a202";
const GRANT: &str = "0303000000640000000000000001000000030000002a0000000000000001000000000000000108080808080808080000000000000000040000000102800001001000000030750000020b00000000000000000000000300000007000000000000000200000003000000050000000000000000001000000000000c0000000000000000000000030000000700000000000000020000000300000005000000000000000000100000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000828b68abeb425f68b9eb070cca17cfadd96e7893bde28d2b2a0dbb4375108b7a68e9e8db46afc0c3a8d65a257a70098a7fb4fe0df635667ed3be932209f00d0c";
const BATCH: &str = "040300000065000000000000000b0000000000000005000000f1b228af11a1f03264e3f2df42b0deb6f5b564df2552bfceaa99b9e0321922fb8060cd03e3aaddcdd2f8b2bdb1cdd5761694439becd0d28c54a7cc04ac491af069c4cf50e86a6981c14f3b13b1efddec814d4f3d148e911ac5ec6e3a3bc06b05";
const REGION: &str = "050300000065000000000000000b0000000000000000000000030000000700000000000000020000000000000000000040000000000000000000000000efbeedfe000000007463700000000000000000000000000008020001027f0000010000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000074858040748e3abbef922839aa6557e7468f162289f56b3e77f1d2688af4e12ae1bb5e2ecd01e92850378a2cc3024d4c205c331445035db2e7074b4ea8c7808";

fn is_read_and_written_the_same<S: Statement + PartialEq + Debug>(recorded: &str, signed: &Signed<S>) {
    assert_eq!(&Signed::<S>::decode(&hex::decode(recorded).unwrap()).unwrap(), signed, "{}", S::NAME);
    assert_eq!(hex::encode(signed.encode()), recorded, "{}", S::NAME);
}

#[test]
fn a_recorded_frame_is_read() {
    let slot = hex::decode(FRAME).unwrap();
    let (header, payload) = (FrameHeader::read_from(&slot).unwrap(), &slot[128..]);
    let expected = FrameHeader {
        namespace: NamespaceId(4),
        key: Key::new("layer-7/block-12").unwrap(),
        version: Version { clock: HybridClock(0x0193_7a5c_0000_0003), writer: WriterId::anonymous([8; 8]) },
        kind: FrameKind::Value,
        payload_bytes: 8,
        payload_crc: crc32c::crc32c(b"recorded"),
    };
    assert_eq!((header, payload), (expected.clone(), &b"recorded"[..]));
    let mut written = vec![0; expected.bytes()];
    expected.write_to(&mut written);
    assert_eq!(hex::encode(&written), FRAME[..256]);
}

#[test]
fn recorded_statements_are_read() {
    is_read_and_written_the_same(CERTIFICATE, &certificate(META_SERIAL, META, Role::Meta, &key(2)));
    is_read_and_written_the_same(GRANT, &key(2).sign(CLUSTER, GENERATION, META_SERIAL, grant()));
    is_read_and_written_the_same(BATCH, &key(3).sign(CLUSTER, GENERATION, DATA_SERIAL, batch().1));
    is_read_and_written_the_same(REGION, &key(3).sign(CLUSTER, GENERATION, DATA_SERIAL, record()));
}
