-- KEYS[1] meta  [2] flows  [3] sizes  [4] ended  [5] buckets  [6] recent  [7] evicted
-- ARGV[1] prefix of other keys  [2] for how many seconds an installation owns a shard that it uses
-- Returns the checkpoint and, if there is one, its seal and the format of the shard; without one, perhaps 1 if it was that of another topic. Or 'IN_USE' with
-- the name of another installation, and nothing has changed. HDEL comes first: a
-- full Redis never refuses it, and refuses no write of a script that has already written.
local before = redis.call('HMGET', KEYS[1], 'installation', 'topic', 'seen')
if before[1] and before[1] ~= installation and before[3] and tonumber(seconds()) - tonumber(before[3]) < tonumber(ARGV[2]) then
  return {'IN_USE', before[1]}
end
redis.call('HDEL', KEYS[1], 'cleared')
redis.call('HSET', KEYS[1], 'owner', owner, 'installation', installation, 'topic', topic, 'seen', seconds())
if before[1] ~= installation or before[2] ~= topic then
  -- The jobs, if there are any, are those of another topic.
  local is_other = redis.call('HEXISTS', KEYS[1], 'offset')
  without_mark()
  return {false, false, is_other}
end
local known = redis.call('HMGET', KEYS[1], 'offset', 'at', 'seal', 'format')
if known[1] and known[4] ~= format then
  -- The caller clears it.
  return known
end
local found = mark()
if not found[2] then
  return found
end

-- Up to the limits here and below, counting takes less than 100 ms. In a larger shard, a lost key is detected when one of its
-- jobs is queried.
local waiting
if redis.call('ZCARD', KEYS[2]) <= 30000 then
  waiting = 0
  local flows = redis.call('ZRANGE', KEYS[2], 0, -1, 'WITHSCORES')
  for i, size in ipairs(sizes_of(flows, 1, 2)) do
    local set = ARGV[1] .. 'due:' .. flows[i * 2 - 1]
    local first = redis.call('ZRANGE', set, 0, 0, 'WITHSCORES')[2]
    if redis.call('ZCARD', set) ~= tonumber(size) or first ~= flows[i * 2] then
      return without_mark()
    end
    waiting = waiting + size
  end
end

-- Each job has a due or end time and a record, so these numbers are equal.
if waiting and redis.call('SCARD', KEYS[5]) <= 100000 then
  local records = 0
  for _, bucket in ipairs(redis.call('SMEMBERS', KEYS[5])) do
    records = records + redis.call('HLEN', ARGV[1] .. 'job:' .. bucket)
  end
  if records ~= waiting + redis.call('ZCARD', KEYS[4]) then
    return without_mark()
  end
end
found[3] = known[3]
found[4] = known[4]
return found
