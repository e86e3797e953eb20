/*
 * Arrival flags, epochs and banks: two rail peers run launch after launch, as skewed as the protocol lets them, over a
 * network that delivers in any order. README.md maps the steps to the code.
 *
 * Scaled down: epochs go round modulo 16, so that the model runs for ever and the wrap is in it; an immediate carries 3
 * bits of the epoch; a bank has two chunks, each in a granule of its own, and a launch uses one or both of them; idle
 * granules are refreshed every 2 epochs, a quarter of what an immediate tells apart, as in the code.
 *
 * -DORDERED: the fabric writes the flag itself, behind the payload (verbs, loopback). Otherwise the receiving proxy
 * rebuilds it from the immediate (ofi).
 * -DONE_BANK: banks = 1.
 * -DM_...: mutants, each of which must fail (models.txt).
 */
#define FULL 16 /* epochs; in the code 2^32 */
#define IMM 8   /* of an immediate; in the code 2^10 */
#ifdef ONE_BANK
#define BANKS 1
#else
#define BANKS 2
#endif
#ifdef M_REFRESH_TOO_RARE
#define REFRESH (4 / BANKS)
#else
#define REFRESH (2 / BANKS) /* in uses of a bank; in the code 128 */
#endif

#define PLUS(e, n) (((e) + FULL + (n)) % FULL)
#ifdef M_COMPARE_WITHOUT_WRAP
#define REACHED(a, b) ((a) >= (b))
#else
#define REACHED(a, b) (((a) + FULL - (b)) % FULL < FULL / 2) /* epoch_reached() */
#endif
#define BANK(e) ((e) % BANKS)                                /* bank_of() */
#ifdef M_NO_REFRESH
#define REFRESH_DUE(e) false
#else
#define REFRESH_DUE(e) (((e) / BANKS) % REFRESH == 0)        /* refresh_due() */
#endif

/* Flags of a rank, and what is on its way to them: arrival(bank, chunk) 0 to 3, release(bank) 4 and 5. */
#define FLAGS 6
#define ARRIVAL(bank, chunk) ((bank) * 2 + (chunk))
#define RELEASE(bank) (4 + (bank))
#define GRANULES 5 /* one for each arrival flag, one for all releases */
#define GRANULE(flag) ((flag) < 4 -> (flag) : 4)

byte flag[2 * FLAGS] = 0;    /* [rank][flag] */
byte last[2 * GRANULES] = 0; /* ArrivalBoard::granules_ */
byte staging[8] = 0;         /* [rank][bank][chunk]: the epoch whose sum lies there */
byte received[8] = 0;        /* likewise: what lies in the receive banks */

/* A message to a flag of a rank. One flag has at most one on its way: asserted. */
#define NOTHING 0
#define POSTED 1 /* the source may still be read */
#define LANDED 2 /* the payload is there, or there is none; the flag is not shown */
#ifdef M_FLAG_BEFORE_PAYLOAD
#define WITHOUT_PAYLOAD POSTED
#else
#define WITHOUT_PAYLOAD LANDED
#endif
byte stage[2 * FLAGS] = NOTHING;
byte carries[2 * FLAGS] = 0; /* its epoch */

byte launch[2] = 1;     /* the launch each rank is in */
byte received_all[2] = 0;
byte wide[4] = 0;       /* chunks of the launches under way (all ranks agree on m); 0: nobody has begun it */

#define MINE(f) (me * FLAGS + (f))
#define PEER(f) ((1 - me) * FLAGS + (f))
#define PLACE(rank, bank, chunk) ((rank) * 4 + (bank) * 2 + (chunk))

inline post(f, first_stage) {
  assert(stage[PEER(f)] == NOTHING); /* "the values of one flag arrive in order on any network" */
  stage[PEER(f)] = first_stage;
  carries[PEER(f)] = e
}

/* The compute, reduce and send blocks of one rank. */
proctype sender(byte me) {
  byte e = 1;
  do
  :: atomic {
      /* "all epochs under way in one operator lie within two of each other" */
      assert((e + FULL + BANKS - launch[1 - me]) % FULL <= 2 * BANKS);
      if
#ifdef ONE_BANK
      :: wide[e % 4] == 0 -> if :: wide[e % 4] = 1 :: wide[e % 4] = 2 fi
#else
      :: wide[e % 4] == 0 -> wide[e % 4] = (e % 8 < 3 -> 2 : 1) /* any choice would take too long here */
#endif
      :: else
      fi
    };
#ifndef M_NO_STAGING_WAIT
    /* await_staging_free(): the daemon has read what the bank's last launch sent. */
    stage[PEER(ARRIVAL(BANK(e), 0))] != POSTED && stage[PEER(ARRIVAL(BANK(e), 1))] != POSTED;
#endif
    atomic {
      staging[PLACE(me, BANK(e), 0)] = e;
      if :: wide[e % 4] == 2 -> staging[PLACE(me, BANK(e), 1)] = e :: else fi
    };
    /* await_release() */
#ifndef M_NO_RELEASE_WAIT
#ifdef M_RELEASE_WAIT_ONE_USE_TOO_OLD
    REACHED(flag[MINE(RELEASE(BANK(e)))], PLUS(e, -2 * BANKS));
#else
    REACHED(flag[MINE(RELEASE(BANK(e)))], PLUS(e, -BANKS));
#endif
#endif
    atomic { /* in one step, since the network has its own order */
      post(ARRIVAL(BANK(e), 0), POSTED);
      if
      :: wide[e % 4] == 2 -> post(ARRIVAL(BANK(e), 1), POSTED)
      :: wide[e % 4] != 2 && REFRESH_DUE(e) -> post(ARRIVAL(BANK(e), 1), WITHOUT_PAYLOAD)
      :: else
      fi
    };
    /* send_releases() */
#ifndef M_RELEASE_BEFORE_READ
    received_all[me] == e;
#endif
#ifndef M_RELEASE_BEFORE_REFRESH_ARRIVED
    if
    :: wide[e % 4] != 2 && REFRESH_DUE(e) -> REACHED(flag[MINE(ARRIVAL(BANK(e), 1))], e)
    :: else
    fi;
#endif
#ifndef M_RELEASE_FORGOTTEN
    atomic { post(RELEASE(BANK(e)), LANDED) };
#endif
    received_all[me] == e;
progress_launched:
    atomic {
      if
      :: launch[1 - me] == e
      :: else -> wide[e % 4] = 0 /* the last rank to leave it */
      fi;
      e = PLUS(e, 1);
      launch[me] = e
    }
  od
}

/* Its receive blocks: sees a chunk at any time after its arrival. */
#define READS(chunk) \
  staging[PLACE(me, BANK(e), chunk)] == e && /* await_chunk_reduced(): shown when it was written */ \
    REACHED(flag[MINE(ARRIVAL(BANK(e), chunk))], e); /* await_arrival() */ \
  assert(received[PLACE(me, BANK(e), chunk)] == e && staging[PLACE(me, BANK(e), chunk)] == e)

proctype receiver(byte me) {
  byte e = 1;
  do
  :: atomic { launch[me] == e && wide[e % 4] != 0 -> READS(0) };
    atomic {
      if
      :: wide[e % 4] == 2 -> READS(1)
      :: else
      fi;
      received_all[me] = e;
      e = PLUS(e, 1)
    }
  od
}

/* The bytes of the message to flag f of rank `to` are all there. */
inline land(to, f) {
  received[to * 4 + f] = staging[(1 - to) * 4 + f]
}

/* Its flag is shown. */
inline publish(to, f) {
  value = carries[to * FLAGS + f];
#ifdef ORDERED
  assert(REACHED(value, flag[to * FLAGS + f])); /* "it never goes back" */
  flag[to * FLAGS + f] = value;
#else
  /* immediate_epoch() */
  granule = to * GRANULES + GRANULE(f);
  ahead = (value % IMM + IMM - last[granule] % IMM) % IMM;
#ifdef M_IMMEDIATE_ALWAYS_AHEAD
  rebuilt = PLUS(last[granule], ahead);
#else
  rebuilt = (ahead < IMM / 2 -> PLUS(last[granule], ahead) : PLUS(last[granule], ahead - IMM));
#endif
  assert(rebuilt == value);
  /* ArrivalBoard::publish() */
  if :: REACHED(rebuilt, last[granule]) -> last[granule] = rebuilt :: else fi;
  if :: !REACHED(flag[to * FLAGS + f], rebuilt) -> flag[to * FLAGS + f] = rebuilt :: else fi;
  granule = 0; ahead = 0; rebuilt = 0;
#endif
  value = 0
}

inline forget(to, f) {
  stage[to * FLAGS + f] = NOTHING;
  carries[to * FLAGS + f] = 0
}

#ifdef M_FLAG_BEFORE_PAYLOAD
#define FIRST publish
#define THEN land
#else
#define FIRST land
#define THEN publish
#endif
#define DELIVERS(f) \
  :: atomic { stage[to * FLAGS + f] == POSTED -> FIRST(to, f); stage[to * FLAGS + f] = LANDED } \
  :: atomic { stage[to * FLAGS + f] == LANDED -> THEN(to, f); forget(to, f) }
#define SHOWS(f) \
  :: atomic { stage[to * FLAGS + f] == LANDED -> publish(to, f); forget(to, f) }

/* All messages to one rank, each in its own time. */
proctype network(byte to) {
  byte value, granule, ahead, rebuilt;
end:
  do
  DELIVERS(0)
  DELIVERS(1)
  DELIVERS(2)
  DELIVERS(3)
  SHOWS(4)
  SHOWS(5)
  od
}

init {
  atomic {
    run sender(0); run receiver(0); run network(0);
    run sender(1); run receiver(1); run network(1)
  }
}
